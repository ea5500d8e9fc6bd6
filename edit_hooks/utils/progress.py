"""Progress reports of long computations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# Called with the number of units finished since the last call.
Progress: TypeAlias = Callable[[int], None]

# Called with the positions of units that are finished, and their results.
Finished: TypeAlias = Callable[[Sequence[int], Sequence[Any]], None]


class Rounds:
    """Progress of units that are finished together, after rounds: each round counts as an even share of them.

    Args:
        count: number of units.
        rounds: most rounds; those that an early end leaves out are reported by :meth:`end`.
        progress: called with whole units.
    """

    def __init__(self, count: int, rounds: int, progress: Progress) -> None:
        self._count, self._rounds, self._progress = count, rounds, progress
        self._done = self._reported = 0

    def next(self, rounds: int = 1) -> None:
        """Rounds are done."""
        self._done += rounds
        self._report(self._count * self._done // self._rounds)

    def end(self) -> None:
        """All units are finished."""
        self._report(self._count)

    def _report(self, finished: int) -> None:
        if finished > self._reported:
            self._progress(finished - self._reported)
            self._reported = finished


def ignore_finished(positions: Sequence[int], results: Sequence[Any]) -> None:
    """Do nothing with results that are also returned at the end."""
