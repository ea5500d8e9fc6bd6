"""Plans: groups in order, checkpoints by number of edits."""

from __future__ import annotations

import pytest

from edit_hooks import EditingError, EditRequest
from edit_hooks.lm.plan import EditPlan, chunked

REQUESTS = [EditRequest(prompt=f"Fact {number} is", target_new="true") for number in range(5)]


def test_groups_are_consecutive_and_the_last_may_be_smaller() -> None:
    plan = EditPlan(chunked(REQUESTS, 2), cumulative=True, checkpoints=(1, 3, 4))
    assert [len(group) for group in plan.groups] == [2, 2, 1] and plan.num_edits == 5
    assert [plan.group_of[request.key] for request in REQUESTS] == [0, 0, 1, 1, 2]
    assert [plan.edits_after(step) for step in range(3)] == [2, 4, 5]
    assert plan.checkpoint_steps() == {1: 0, 3: 1, 4: 1}


def test_an_empty_plan_has_no_edits() -> None:
    assert EditPlan().num_edits == 0 and EditPlan().checkpoint_steps() == {}


def test_checkpoints_beyond_the_edits_are_errors() -> None:
    with pytest.raises(EditingError, match=r"checkpoints=\[6\] lie beyond the 5 edits"):
        EditPlan(chunked(REQUESTS, 2), checkpoints=(5, 6))
