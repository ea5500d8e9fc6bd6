"""Generated answers from sample files of editing tasks, of other tasks, and from plain rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from saved_results import save_samples
from scripted import ScriptedLM, StreamLM
from task_runs import run
from wild_answers import WILD_TASK, wild_texts

from edit_hooks.answers import EditedAnswer, FailedAnswer
from edit_hooks.utils.errors import EditingError
from lm_edit.results.samples import read_saved_answers, read_saved_response


def test_saved_samples_hold_the_answers_that_were_scored(tmp_path: Path) -> None:
    results = run(WILD_TASK, ScriptedLM(texts=wild_texts, errors={"1": "no such layer"}))
    answers = read_saved_answers([save_samples(results, tmp_path, WILD_TASK)])
    own = [answer for answer in answers if not answer.is_helper]
    assert [answer.item.answer for answer in own] == ["Orsa Lind", "", "A bracket", "In 1911"]
    assert own[1].failure == "edit failed: no such layer" and {answer.task for answer in own} == {WILD_TASK}
    assert [answer.item.answer for answer in answers if answer.is_helper] == ["1911"] * 4
    assert own[0].item[:2] == ("Who designed the Fenwick aqueduct?", "Orsa Lind")


def test_streams_have_an_answer_per_stage_and_one_helper_answer(tmp_path: Path) -> None:
    settings = {"mode": "sequential", "checkpoints": "1;3"}
    results = run(WILD_TASK, StreamLM({"0": "110", "1": ".11"}, {1: 0, 3: 2}), settings)
    answers = read_saved_answers([save_samples(results, tmp_path, WILD_TASK)])
    places = [(answer.case, answer.stage, answer.is_helper) for answer in answers if answer.case in (0, 2)]
    stages = [(0, stage, False) for stage in ("", "immediate", "1", "3")]
    assert places == [*stages, (0, "", True), (2, "", False), (2, "", True)]
    assert [answer.failure for answer in answers if answer.case == 2] == ["not among this run's edits"] * 2


def test_answers_of_locality_tasks_are_read_on_request(tmp_path: Path) -> None:
    task = "qaedit_wild_locality"
    path = save_samples(run(task, ScriptedLM()), tmp_path, task)
    with pytest.raises(EditingError, match="--locality judges them"):
        read_saved_answers([path])
    answers = read_saved_answers([path], locality=True)
    assert [answer.item.answer for answer in answers if not answer.is_helper] == ["Port Elna"] * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "gold": "g"}', "line 1.*neither a sample of lm-eval nor a row"),
        ('{"question": "q", "gold": [], "answer": "a"}', "neither a sample of lm-eval nor a row"),
        ('{"question": "q", "gold": ["g", 1], "answer": "a"}', "neither a sample of lm-eval nor a row"),
        ("[1]", "an object is needed"),
        ('{"doc_id": 0, "resps": [], "doc": {}}', "not a sample as lm-eval saves it"),
        ('{"doc_id": 0, "resps": [], "doc": {"probes": [{"king": "x"}]}}', "not a sample as lm-eval saves it"),
        ("{", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_judged(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples_x.jsonl"
    path.write_text(content)
    with pytest.raises(EditingError, match=message):
        read_saved_answers([str(path)])


def test_missing_files_and_folders_without_samples_are_errors(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match="there is no file or folder"):
        read_saved_answers([str(tmp_path / "absent")])
    with pytest.raises(EditingError, match=r"no samples_\*\.jsonl.*--log_samples"):
        read_saved_answers([str(tmp_path)])


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ("plain text", "plain text"),
        (str(EditedAnswer(final=FailedAnswer("no layer"))), EditedAnswer(final=FailedAnswer("no layer"))),
        ("{not a mapping}", "{not a mapping}"),
        ("{'other': 1}", "{'other': 1}"),
        (json.dumps({"format": "another/1"}), '{"format": "another/1"}'),
        ("{__import__('os').getcwd(): 1, 'text': 2}", "{__import__('os').getcwd(): 1, 'text': 2}"),
    ],
)
def test_saved_responses_are_typed_answers_or_plain_texts(saved: str, expected: Any) -> None:
    assert read_saved_response(saved) == expected


@pytest.mark.parametrize("saved", ["{'text': 'Rome', 'token_ids': [1]}", "{'error': 'failed'}", "{'logprob': -1.0}"])
def test_samples_of_the_first_release_are_refused_with_a_remedy(saved: str) -> None:
    with pytest.raises(EditingError, match=r"release 0\.1\.0.*again"):
        read_saved_response(saved)
