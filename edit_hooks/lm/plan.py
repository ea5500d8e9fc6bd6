"""`EditPlan`: groups of requests that are written together, and their order.

Modes: ``none`` (no edit), ``single`` (each case's own edits on the unedited model), ``batch`` (all edits at once, or
groups of ``group_size`` edits, each group on the unedited model), ``sequential`` (a stream in steps of
``edit_batch_size`` on the same weights) and ``loaded`` (all questions under one saved edit). In ``batch`` and
``sequential`` the edits come from ``edits=``, never from the documents of the tasks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError

MODES = ("none", "single", "batch", "sequential", "loaded")


@dataclass(frozen=True)
class EditPlan:
    """The groups of requests of a run.

    Attributes:
        groups: requests written together, in order; empty for ``none`` and ``single``.
        cumulative: groups are written one after another on the same weights.
        checkpoints: numbers of edits after which all cases edited so far are answered as well.
    """

    groups: tuple[RequestGroup, ...] = ()
    cumulative: bool = False
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        beyond = [checkpoint for checkpoint in self.checkpoints if checkpoint > self.num_edits]
        if beyond:
            raise EditingError(f"checkpoints={beyond} lie beyond the {self.num_edits} edits of this run.")

    @functools.cached_property
    def group_of(self) -> Mapping[str, int]:
        """Request key -> index of its group."""
        return {request.key: index for index, group in enumerate(self.groups) for request in group}

    @property
    def num_edits(self) -> int:
        return sum(len(group) for group in self.groups)

    def in_context(self, context: PromptContext) -> EditPlan:
        """The same plan with its edits made in a context."""
        groups = tuple(tuple(request.in_context(context) for request in group) for group in self.groups)
        return dataclasses.replace(self, groups=groups)

    def edits_after(self, step: int) -> int:
        """Number of edits in the groups up to and including ``step``."""
        return sum(len(group) for group in self.groups[: step + 1])

    def checkpoint_steps(self) -> dict[int, int]:
        """Checkpoint (number of edits) -> the first step that reaches it."""
        steps = range(len(self.groups))
        return {
            checkpoint: next(step for step in steps if self.edits_after(step) >= checkpoint)
            for checkpoint in self.checkpoints
        }


def chunked(requests: Sequence[EditRequest], size: int) -> tuple[RequestGroup, ...]:
    """Consecutive groups of ``size`` requests; the last may be smaller."""
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(requests), size))
