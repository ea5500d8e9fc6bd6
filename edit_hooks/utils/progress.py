"""Progress reports of long computations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# Called with the number of units finished since the last call.
Progress: TypeAlias = Callable[[int], None]

# Called with the positions of units that are finished, and their results.
Finished: TypeAlias = Callable[[Sequence[int], Sequence[Any]], None]


def ignore_finished(positions: Sequence[int], results: Sequence[Any]) -> None:
    """Do nothing with results that are also returned at the end."""
