"""`EditPlan`: groups of requests that are written together, and their order.

Modes: ``none`` (no edit), ``single`` (each case's own edits on the unedited model), ``batch`` (all edits at once, or
groups of ``group_size`` edits, each group on the unedited model), ``sequential`` (a stream in steps of
``edit_batch_size`` on the same weights) and ``loaded`` (all questions under one saved edit). In ``batch`` and
``sequential`` the edits come from ``edits=``, never from the documents of the tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError

MODES = ("none", "single", "batch", "sequential", "loaded")


@dataclass(frozen=True)
class EditPlan:
    """The groups of requests of a run.

    Attributes:
        groups: requests written together, in order; empty for ``none`` and ``single``.
        unusable: request key -> reason for requests that keep their place in a group and are not written.
        cumulative: groups are written one after another on the same weights.
        checkpoints: numbers of edits after which all cases edited so far are answered as well.
    """

    groups: tuple[RequestGroup, ...] = ()
    cumulative: bool = False
    checkpoints: tuple[int, ...] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planned = sum(len(group) for group in self.groups)
        beyond = [checkpoint for checkpoint in self.checkpoints if checkpoint > planned]
        if beyond:
            raise EditingError(f"checkpoints={beyond} lie beyond the {planned} edits of this run.")

    @functools.cached_property
    def group_of(self) -> Mapping[str, int]:
        """Request key -> index of its group."""
        return {request.key: index for index, group in enumerate(self.groups) for request in group}

    def usable(self, group: RequestGroup) -> RequestGroup:
        """The requests of a group that are written."""
        return tuple(request for request in group if request.key not in self.unusable)

    @property
    def num_edits(self) -> int:
        """Number of edits, without unusable ones."""
        return sum(len(self.usable(group)) for group in self.groups)

    def in_context(self, context: PromptContext) -> EditPlan:
        """The same plan with its edits made in a context."""
        groups = tuple(tuple(request.in_context(context) for request in group) for group in self.groups)
        return dataclasses.replace(self, groups=groups)

    def edits_after(self, step: int) -> int:
        """Number of edits in the groups up to and including ``step``, without unusable ones."""
        return sum(len(self.usable(group)) for group in self.groups[: step + 1])

    def checkpoint_steps(self) -> dict[int, int]:
        """Checkpoint (number of planned edits) -> the first step that reaches it."""
        planned = list(itertools.accumulate(len(group) for group in self.groups))
        return {
            checkpoint: next(step for step, number in enumerate(planned) if number >= checkpoint)
            for checkpoint in self.checkpoints
        }


def chunked(requests: Sequence[EditRequest], size: int) -> tuple[RequestGroup, ...]:
    """Consecutive groups of ``size`` requests; the last may be smaller."""
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(requests), size))
