"""Progress reports of long computations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# Called with the number of units finished since the last call.
Progress: TypeAlias = Callable[[int], None]
