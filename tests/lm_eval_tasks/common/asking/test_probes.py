"""Documents of cases with several edits, and of questions about no edit."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest
from scripted import StreamLM, generated, scored
from task_runs import run

from edit_hooks.answers import IMMEDIATE, EditedAnswer, GeneratedText, StreamPosition
from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers, Document, Probe, case_doc, question_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.task.stages import StreamStages

FIRST, SECOND = (
    EditRequest(prompt="{} lies in", subject=subject, target_new=target, case_id="7")
    for subject, target in (("Velm", "Osteria"), ("Osteria", "Arlandia"))
)
PROBE = Probe(kind="multi_hop", prompt="Which continent is Velm in?", generate=True, gold="Arlandia")


def test_a_document_holds_all_edits_of_its_case() -> None:
    case = Case(request=FIRST, further_requests=[SECOND])
    doc = case_doc(case, [PROBE], generate=True)
    assert case.requests == (FIRST, SECOND)
    assert [EditRequest.from_dict(record) for record in doc["edit_requests"]] == [FIRST, SECOND]
    assert doc["case_id"] == "7"


def test_a_question_about_no_edit_is_scored_at_checkpoints_and_at_the_end() -> None:
    doc = question_doc("3", [PROBE], {"origin": "neutral"})
    assert (doc["case_id"], doc["edit_requests"], doc["origin"]) == ("3", [], "neutral")
    assert Probe.from_json(doc["probes"][0]) == Probe.from_json(PROBE.to_json())
    position = StreamPosition(edited=True, step=None, num_edits=5, cases_before=0, num_cases=5)
    stages = StreamStages(immediate=True, checkpoints=(2,))
    assert not position.not_in_stream
    assert [stages.applies_to(stage, position) for stage in stages.columns] == [False, True]


def test_questions_are_parsed_once_for_all_stages_pipelines_and_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: Counter[str] = Counter()
    from_json = Probe.from_json

    def count(record: Any) -> Probe:
        parsed[json.dumps(record)] += 1
        return from_json(record)

    monkeypatch.setattr(Probe, "from_json", count)
    lm = StreamLM({"0": "11", "1": ".1"}, {1: 0}, retention=True)
    results = run("bake_rq", lm, {"mode": "sequential", "checkpoints": "1", "retention": True})
    probes = Counter(json.dumps(probe) for sample in results["samples"]["bake_rq"] for probe in sample["doc"]["probes"])
    assert parsed == probes and len(probes) >= 2


def test_a_document_is_its_plain_values_and_other_processes_get_only_those() -> None:
    plain = case_doc(Case(request=FIRST), [PROBE], generate=True)
    doc = Document(plain)
    assert [request.number for request in doc.requests] == [0] and Document.of(doc) is doc
    assert json.dumps(doc) == json.dumps(plain)
    copy = pickle.loads(pickle.dumps(doc))
    assert copy == plain and vars(copy) == {} and copy.requests == doc.requests


def test_answers_of_a_case_at_its_stages() -> None:
    """A helper's answer, of the unedited model, is the same at every stage."""
    helper = Probe(kind="pre_edit", prompt="Who?", generate=True, gold="x", ask="unedited")
    doc = case_doc(Case(request=FIRST), [Probe(kind="a", prompt="b", targets=["c"]), helper], generate=True)
    scores = EditedAnswer(final=scored(-1.0, [0]), stages={IMMEDIATE: scored(-2.0, [0]), 4: scored(-3.0, [0])})
    case = CaseAnswers(doc, [scores, EditedAnswer(final=generated("z", "length"))])
    for stage, logprob in ((None, -1.0), (IMMEDIATE, -2.0), (4, -3.0)):
        of_target, of_helper = case.at(stage).probes
        assert of_target.wanted.logprob == logprob and of_helper.generation.raw == "z"
    with pytest.raises(AssertionError, match="-1 answers more than requests"):
        CaseAnswers(doc, [scores])


def test_the_text_of_a_result_is_json_from_the_model_and_the_answer_after_a_pipeline() -> None:
    result = EditedAnswer(final=GeneratedText(raw=" Arlandia. And"))
    assert json.loads(str(result))["answer"]["raw"] == " Arlandia. And"
    assert str(result.filtered(GeneratedText(raw=" Arlandia. And", stops=(".",)), {}, judged=False)) == " Arlandia"
