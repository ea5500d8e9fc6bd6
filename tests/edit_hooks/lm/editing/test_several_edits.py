"""Cases with several edits, edits that cases share, and questions about no edit, on a tiny model."""

from __future__ import annotations

import json

import pytest
from lm_runs import build, flat, instance

import edit_hooks.lm.options.edit_sources
from edit_hooks import EditRequest
from edit_hooks.answers import IMMEDIATE, FailedAnswer
from edit_hooks.lm.options.edit_sources import load_edited_cases, load_edits
from edit_hooks.lm.sessions import ABOUT_NO_EDIT
from edit_hooks.request import EditedCases
from edit_hooks.utils.errors import EditingError

FACTS = {"Port Elna": "Dravonia", "Marsk": "Tolmeria", "Quill Bay": "Osteria"}
FIRST, SECOND, THIRD = (
    EditRequest(prompt="{} is the capital of", subject=subject, target_new=target) for subject, target in FACTS.items()
)
CASES = [(FIRST, SECOND), (SECOND, THIRD)]  # they share an edit
EDITORS = {
    "rome": {"context_templates": ["{}"], "num_steps": 4},  # writes one request at a time
    "ft_m": {"num_steps": 3, "lr": 0.01},
}


def question(requests, prompt="Marsk is the capital of", target=" Tolmeria", asked="edited"):
    doc = {"edit_requests": [request.to_dict() for request in requests], "asked": {"model": asked}, "case_id": "0"}
    return instance(doc, prompt, target)


@pytest.fixture
def edited_model(tiny_path, monkeypatch):
    def make(editor, **options):
        monkeypatch.setattr(edit_hooks.lm.options.edit_sources, "read_edited_cases", lambda *_: EditedCases(CASES, {}))
        return build(str(tiny_path("llama")), editor=editor, editor_args=dict(EDITORS[editor]), **options)

    return make


@pytest.mark.parametrize("editor", EDITORS)
def test_a_case_is_answered_under_all_its_edits_in_every_mode(edited_model, editor):
    """Alone, as a group of one case, and as the first step of a stream: the same two edits."""
    (unedited,) = edited_model(editor, mode="none").loglikelihood([question(CASES[0])])
    (alone,) = edited_model(editor).loglikelihood([question([SECOND])])
    (single,) = edited_model(editor).loglikelihood([question(CASES[0])])
    (grouped,) = edited_model(editor, mode="batch", edits="cases", group_size=1).loglikelihood([question(CASES[0])])
    stream = edited_model(editor, mode="sequential", edits="cases")
    (first, second) = stream.loglikelihood([question(CASES[0]), question(CASES[1])])
    assert flat(single) == flat(grouped)
    assert single.final.logprob == pytest.approx(first.stages[IMMEDIATE].logprob, abs=1e-4)
    assert abs(single.final.logprob - alone.final.logprob) > 1e-3  # the other edit is there, too
    assert single.final.logprob > unedited.final.logprob + 0.01
    assert (first.position.step, second.position.step, second.position.cases_before) == (0, 1, 1)
    assert (first.position.num_edits, first.position.num_cases) == (3, 2)
    steps = stream.session.result_metadata()["steps"]
    assert [step["num_edits"] for step in steps] == [2, 3]  # the shared edit is made once


@pytest.mark.parametrize("editor", EDITORS)
def test_a_case_whose_edit_an_earlier_case_has_is_answered_with_its_step(editor, tiny_path, monkeypatch):
    """It joins the step before; an editor that writes one request at a time still writes one."""
    repeated = [(FIRST,), (SECOND,), (FIRST,), (THIRD,)]
    monkeypatch.setattr(edit_hooks.lm.options.edit_sources, "read_edited_cases", lambda *_: EditedCases(repeated, {}))
    stream = {"mode": "sequential", "edits": "cases"}
    lm = build(str(tiny_path("llama")), editor=editor, editor_args=dict(EDITORS[editor]), **stream)
    answers = lm.loglikelihood([question(case) for case in repeated])
    assert [answer.position.step for answer in answers] == [0, 1, 0, 2]
    assert [step["num_edits"] for step in lm.session.result_metadata()["steps"]] == [1, 2, 3]


def test_two_cases_of_a_step_need_an_editor_that_writes_both(tiny_path, tmp_path):
    path = tmp_path / "edits.jsonl"
    path.write_text("".join(f"{json.dumps(edit.to_dict())}\n" for edit in (FIRST, SECOND)))
    with pytest.raises(EditingError, match="writes one request at a time"):
        build(str(tiny_path("llama")), editor="rome", mode="sequential", edits=str(path), edit_batch_size=2)


def test_a_question_about_no_edit_is_asked_of_the_model_after_all_edits(edited_model):
    stream = edited_model("ft_m", mode="sequential", edits="cases")
    about_none, last = stream.loglikelihood([question([]), question(CASES[1])])
    assert flat(about_none) == flat(last)
    assert about_none.position.edited and about_none.position.step is None
    assert not about_none.position.not_in_stream and not about_none.stages
    unedited = edited_model("ft_m", mode="none")
    (before,) = unedited.loglikelihood([question([])])
    (only_unedited,) = stream.loglikelihood([question([], asked="unedited")])
    assert flat(only_unedited) == flat(before) != flat(last)


@pytest.mark.parametrize(
    "options", [{}, {"mode": "batch", "edits": "cases", "group_size": 1}], ids=["single", "groups"]
)
def test_without_one_edited_model_such_a_question_has_a_reason(edited_model, options):
    lm = edited_model("ft_m", **options)
    asked, unedited = lm.loglikelihood([question([]), question([], asked="unedited")])
    assert asked.final == ABOUT_NO_EDIT and not asked.final.is_failure
    assert not isinstance(unedited.final, FailedAnswer)


def test_equal_edits_of_a_file_are_made_once_and_named(tmp_path, caplog):
    path = tmp_path / "edits.jsonl"
    records = [FIRST.to_dict() | {"case_id": "1"}, SECOND.to_dict(), FIRST.to_dict() | {"case_id": "8"}]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert [edit.key for edit in load_edits(str(path), {}, None)] == [FIRST.key, SECOND.key]
    assert "1 of 3 cases have the same edits as an earlier one, first case 1 and 8" in caplog.text
    assert load_edited_cases(str(path), {}, 2) == [(EditRequest(**records[0]),), (SECOND,)]
