"""`EditPlan`: which requests are written together, in which order, and under which of these a document is answered.

Modes: ``none`` (no edit), ``single`` (each case's own edits on the untouched model), ``batch`` (all edits at once, or
groups of ``group_size`` edits, each group on the untouched model), ``sequential`` (a stream in steps of
``edit_batch_size`` on the same weights) and ``loaded`` (everything with one saved edit). In ``batch`` and
``sequential`` the edits come from ``edits=``, never from the documents that happened to be asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError

MODES = ("none", "single", "batch", "sequential", "loaded")


@dataclass(frozen=True)
class EditPlan:
    """The units of a run.

    Attributes:
        units: requests written together, in order; empty for ``none`` and ``single``.
        cumulative: units are written one after another on the same weights.
        checkpoints: numbers of edits after which everything edited so far is answered too.
        unit_of: request key -> index of its unit.
    """

    units: tuple[RequestGroup, ...] = ()
    cumulative: bool = False
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        beyond = [checkpoint for checkpoint in self.checkpoints if checkpoint > self.num_edits]
        if beyond:
            raise EditingError(f"checkpoints={beyond} lie beyond the {self.num_edits} edits of this run.")

    @property
    def unit_of(self) -> Mapping[str, int]:
        return {request.key: index for index, unit in enumerate(self.units) for request in unit}

    @property
    def num_edits(self) -> int:
        return sum(len(unit) for unit in self.units)

    def edits_after(self, step: int) -> int:
        """Number of edits made once unit ``step`` has been written."""
        return sum(len(unit) for unit in self.units[: step + 1])

    def checkpoint_steps(self) -> dict[int, int]:
        """Checkpoint (number of edits) -> the first step that reaches it."""
        steps = range(len(self.units))
        return {
            checkpoint: next(step for step in steps if self.edits_after(step) >= checkpoint)
            for checkpoint in self.checkpoints
        }


def chunked(requests: Sequence[EditRequest], size: int) -> tuple[RequestGroup, ...]:
    """Consecutive units of ``size`` requests; the last may be smaller."""
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(requests), size))
