"""Plans: groups of cases in order, edits that cases share, checkpoints by number of cases."""

from __future__ import annotations

import pytest

from edit_hooks import EditingError, EditRequest
from edit_hooks.lm.options.plan import EditPlan, chunked

REQUESTS = [EditRequest(prompt=f"Fact {number} is", target_new="true") for number in range(6)]
A, B, C, D, E, F = REQUESTS
SINGLE = [(request,) for request in REQUESTS[:5]]
SHARED = [(A, B), (B, C), (A, C), (D,), (D, E)]  # the third case has no edit of its own


def plan_of(cases, size, cumulative, checkpoints=()):
    return EditPlan(chunked(cases, size, cumulative=cumulative), cumulative, checkpoints)


def test_groups_are_consecutive_and_the_last_may_be_smaller() -> None:
    plan = plan_of(SINGLE, 2, True, checkpoints=(1, 3, 4))
    assert plan.groups == ((A, B), (C, D), (E,)) and plan.num_edits == 5
    assert [plan.group_of([request]) for request in REQUESTS] == [0, 0, 1, 1, 2, None]
    assert [plan.cases_before(step) for step in range(3)] == [0, 2, 4]
    assert plan.checkpoint_steps() == {1: 0, 3: 1, 4: 1}


def test_a_stream_makes_a_shared_edit_once_and_answers_a_case_after_its_last_edit() -> None:
    plan = plan_of(SHARED, 1, True, checkpoints=(2, 3, 5))
    assert plan.groups == ((A, B), (C,), (D,), (E,)) and plan.num_edits == 5
    assert [plan.group_of(case) for case in SHARED] == [0, 1, 1, 2, 3]
    assert [plan.cases_before(step) for step in range(4)] == [0, 1, 3, 4]
    assert plan.checkpoint_steps() == {2: 1, 3: 1, 5: 3}
    assert plan.group_of([A, F]) is None and plan.group_of([]) is None


def test_independent_groups_count_cases_and_each_makes_all_its_edits() -> None:
    plan = plan_of(SHARED, 2, False)
    assert plan.groups == ((A, B, C), (A, C, D), (D, E)) and plan.num_edits == 8
    assert [plan.group_of(case) for case in SHARED] == [0, 0, 1, 1, 2]  # A and C are in group 0, too: the case decides
    assert plan.group_of([C, A]) == 1 and plan.group_of([A]) == 0  # not a case: the first group that has all
    assert plan.group_of([B, D]) is None


def test_an_empty_plan_has_no_edits() -> None:
    assert EditPlan().num_edits == 0 and EditPlan().checkpoint_steps() == {}


def test_checkpoints_beyond_the_cases_are_errors() -> None:
    with pytest.raises(EditingError, match=r"checkpoints=\[6\] lie beyond the 5 edited cases"):
        plan_of(SINGLE, 2, False, checkpoints=(5, 6))
