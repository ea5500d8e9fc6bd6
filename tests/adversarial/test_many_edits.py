"""Plans and streams of many edits: the work around an edit grows with the edits, not with their square."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from edit_hooks import EditRequest
from edit_hooks.answers import IMMEDIATE, ScoredContinuation
from edit_hooks.inference.items import ScoreItem
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.lm.sessions import CaseQuestion, StreamSession

ANSWER = ScoredContinuation(logprob=-1.0, is_greedy=True, token_ids=(1,), token_argmax=(1,))


def requests(number: int) -> list[EditRequest]:
    return [EditRequest(prompt=f"Fact {index} is", target_new="true") for index in range(number)]


def test_a_plan_of_many_steps_is_made_at_once() -> None:
    plan = EditPlan(chunked([(request,) for request in requests(20_000)], 1, cumulative=True), True, (20_000,))
    start = time.process_time()
    assert len(plan.groups) == plan.num_edits == 20_000 and plan.most_written_together == 1
    assert plan.cases_before(19_999) == 19_999 and plan.checkpoint_steps() == {20_000: 19_999}
    assert time.process_time() - start < 5  # 16 seconds where every step copied the keys of all earlier ones


@pytest.mark.parametrize("retention", [False, True])
def test_a_stream_looks_at_a_question_when_it_may_be_due(retention: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = requests(40)
    plan = EditPlan(chunked([(request,) for request in edits], 1, cumulative=True), True, (20,))
    looks: list[str] = []
    is_due = StreamSession._is_due
    monkeypatch.setattr(StreamSession, "_is_due", lambda *given: looks.append("due") or is_due(*given))

    class Stream:
        editor = SimpleNamespace(name="none", writes=("weights",))
        stopped, num_steps = None, len(edits)

        def __init__(self) -> None:
            self.plan = plan

        def state_after(self, step: int) -> str:
            return str(step)

        @property
        def unusable(self) -> dict[str, str]:
            looks.append("unusable")
            return {}

        def visit(self, visitor: Any) -> None:
            for step in range(self.num_steps):
                visitor(step, None)

        def edits_after(self, step: int) -> int:
            return step + 1

        def report(self, step: int) -> None:
            return None

    stream: Any = Stream()
    questions = [
        CaseQuestion(ScoreItem((index, number), (1,)), (edit,), "edited")
        for index, edit in enumerate(edits)
        for number in range(3)
    ]
    answered = StreamSession(stream, True, retention).answer(questions, {}, lambda jobs, weights: [ANSWER] * len(jobs))
    for question, answer in zip(questions, answered, strict=True):
        step = edits.index(question.requests[0])
        assert answer.final == answer.stages[IMMEDIATE] == ANSWER
        later = [*(["20"] if step < 20 else []), *(range(step, 40) if retention else ())]
        assert list(answer.stages) == [IMMEDIATE, *later]
    assert looks.count("unusable") == 1
    assert looks.count("due") <= len(questions) * (40 if retention else 3)  # its step, the checkpoint, the last step
