"""Steps of a memory: each one goes on from what the steps before it left.

An edit of a memory contains what it added or replaced, so of two edits that were made independently the later one would
silently replace the earlier. Edits therefore record how many the memory held before them (:data:`NUM_BEFORE`) and after
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.schema import whole
from edit_hooks.utils.errors import EditingError

NUM_BEFORE, NUM_EDITS = "num_before", "num_edits"
STEP_NUMBERS = {NUM_BEFORE: whole(), NUM_EDITS: whole()}  # for the schemas of kinds


def step_numbers(earlier: HookEdit | None) -> dict[str, int]:
    """Settings of an edit after ``earlier``."""
    before = 0 if earlier is None else earlier.settings[NUM_EDITS]
    return {NUM_BEFORE: before, NUM_EDITS: before + 1}


def last_of_each(number_N: torch.Tensor) -> torch.Tensor:
    """Position of the last occurrence of every number, by ascending number."""
    distinct_M, place_N = number_N.unique(return_inverse=True)
    positions_N = torch.arange(len(number_N))
    return torch.zeros_like(distinct_M).scatter_reduce_(0, place_N, positions_N, "amax")


def settings_of_sum(steps: Sequence[HookEdit], after: str = NUM_EDITS) -> dict[str, Any]:
    """The settings of steps as one: those of the last, which begins where the first one does.

    Args:
        after: the setting that holds the number of edits after a step.

    Raises:
        EditingError: for a step that does not go on from the one before it.
    """
    for earlier, step in itertools.pairwise(steps):
        held, before = earlier.settings[after], step.settings[NUM_BEFORE]
        if held != before:
            raise EditingError(
                f"edits of a {step.kind} at {step.settings['module']} do not go on from one another: one was made on "
                f"{before} earlier edits and follows {held}, which it would replace in part. Make them as a stream: "
                "mode=sequential, or Editor.edit(..., history=<the earlier edits>)."
            )
    return {**steps[-1].settings, NUM_BEFORE: steps[0].settings[NUM_BEFORE]}
