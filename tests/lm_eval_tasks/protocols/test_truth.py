"""True or false by hand: the cells, the worked example of docs/benchmarks/questions.md, and calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted import scored
from task_runs import build, metrics_of, run

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import truth

REQUEST = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", target_true="Ostmark", case_id="7")
NEIGHBORS = [Question("Brenholt lies in", "Ostmark", "Karsk"), Question("Lund lies in", "Sud", "Karsk")]
ELSEWHERE = Case(EditRequest(prompt="{} lies in", subject="Tarn", target_new="Nord", case_id="8"))


def document(*neighbors: Question, request: EditRequest = REQUEST) -> dict[str, Any]:
    return next(iter(truth.truth_docs([Case(request, neighbors=neighbors), ELSEWHERE], {})))


def test_every_prompt_is_stated_once_with_a_true_and_once_with_a_false_object() -> None:
    doc = document(*NEIGHBORS)
    stated = [(probe["kind"], probe["prompt"].splitlines()[0], probe["gold"]) for probe in doc["probes"]]
    assert stated == [
        ("new", "Statement: Velm lies in Karsk.", "True"),
        ("old", "Statement: Velm lies in Ostmark.", "False"),
        ("other", "Statement: Velm lies in Nord.", "False"),
        ("neighbor", "Statement: Brenholt lies in Ostmark.", "True"),
        ("bleed", "Statement: Brenholt lies in Karsk.", "False"),
        ("neighbor", "Statement: Lund lies in Sud.", "True"),
        ("bleed", "Statement: Lund lies in Karsk.", "False"),
        ("content_free", "Statement: N/A", "False"),
        ("content_free", "Statement: [MASK]", "False"),
    ]
    assert all(probe["targets"] == ["True", "False"] for probe in doc["probes"])
    assert [probe["ask"] for probe in doc["probes"]] == ["both"] * 7 + ["unedited"] * 2


def test_neighbors_with_the_new_object_as_their_answer_are_left_out() -> None:
    own = Question("Olm lies in", "Karsk", "Ostmark")
    kinds = [probe["kind"] for probe in document(own, *NEIGHBORS, NEIGHBORS[0])["probes"]]
    assert kinds.count("neighbor") == kinds.count("bleed") == 2
    assert "bleed" not in [probe["kind"] for probe in document(own)["probes"]]


def answered(evidence: dict[str, float], before: dict[str, float] | None = None, **document_of: Any) -> dict[str, Any]:
    """Scores from NLL(False) - NLL(True) by kind, edited and unedited; one neighbor."""
    doc = document(NEIGHBORS[0], **document_of)
    answers = []
    for probe in doc["probes"]:
        after, first = evidence.get(probe["kind"], 0.0), (before or {}).get(probe["kind"], 0.0)
        for nll, plain in ((5.0, 5.0), (5.0 + after, 5.0 + first)):
            answers.append(replace(scored(-nll, [0]), unedited=scored(-plain, [0])))
    measures = truth.score_truth(doc, CaseAnswers(doc, answers))
    return {name.removeprefix("truth_"): evaluate(measure).value for name, measure in measures.items()}


def test_the_worked_example() -> None:
    found = answered({"new": 2, "old": 1, "neighbor": 0.5, "bleed": -1, "other": -3}, {"content_free": 1.0})
    assert [found[cell] for cell in ("new", "old", "neighbor", "bleed")] == [1, 0, 1, 1]
    assert found["acc"] == 0.75
    assert found["called_true"] == 0.75  # new, old and neighbor
    assert found["acc_calibrated"] == (1 + 0.5 + 0 + 1) / 4  # evidence - 1 = 1, 0, -0.5, -2
    assert found["other_rejected"] == 1.0
    assert found["acc_unedited"] == 0.5  # all ties


def test_the_prior_is_the_mean_over_both_statements_of_the_unedited_model() -> None:
    doc = document(NEIGHBORS[0])
    answers = []
    for number, probe in enumerate(doc["probes"]):
        edited, plain = {"content_free": (-9.0, 1.0 if number % 2 else 3.0)}.get(probe["kind"], (1.9, 2.1))
        answers.append(replace(scored(-5.0, [0]), unedited=scored(-5.0, [0])))
        answers.append(replace(scored(-5.0 - edited, [0]), unedited=scored(-5.0 - plain, [0])))
    measures = truth.score_truth(doc, CaseAnswers(doc, answers))
    # the prior is (1 + 3) / 2 = 2 in the unedited model: every statement is called false, 1.9 - 2 < 0
    assert evaluate(measures["truth_acc_calibrated"]).value == 0.5
    assert evaluate(measures["truth_called_true"]).value == 1.0
    assert evaluate(truth._credit(CaseAnswers(doc, answers), "new", True, calibrate=True)).value == 0.0


RULES = {
    "always true": {"new": 1, "old": 1, "neighbor": 1, "bleed": 1},
    "always false": {"new": -1, "old": -1, "neighbor": -1, "bleed": -1},
    "true where the new object is": {"new": 1, "old": -1, "neighbor": -1, "bleed": 1},
    "true where the subject is": {"new": 1, "old": 1, "neighbor": -1, "bleed": -1},
    "no edit, all facts known": {"new": -1, "old": 1, "neighbor": 1, "bleed": -1},
    "no preference": {},
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_without_the_fact_have_exactly_one_half(rule: str) -> None:
    assert answered(RULES[rule])["acc"] == 0.5
    assert answered({}, RULES[rule])["acc_unedited"] == 0.5


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
def test_the_right_judgments_have_one_with_or_without_a_bias(bias: float) -> None:
    right = {"new": 1, "old": -1, "neighbor": 1, "bleed": -1}
    found = answered({kind: bias + value for kind, value in right.items()}, {"content_free": bias})
    assert found["acc_calibrated"] == 1.0
    assert found["acc"] == (1.0 if bias == 0 else 0.5)


def test_without_an_original_object_another_records_is_false() -> None:
    request = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", case_id="7")
    doc = document(NEIGHBORS[0], request=request)
    assert "Statement: Velm lies in Nord." in doc["probes"][1]["prompt"] and doc["probes"][1]["kind"] == "old"
    assert doc["other"] == {"objects": ["Nord"], "drawn_from": "template", "seed": 0}


def test_a_record_without_neighbors_keeps_the_cells_it_has() -> None:
    results = run("bake_truth")
    samples = results["samples"]["bake_truth"]
    (without,) = [sample for sample in samples if sample["truth_neighbor"] is None]
    assert without["unscored_reason"]["truth_acc"] == "the record has no neighborhood prompts"
    assert without["truth_new"] is not None
    assert metrics_of(results, "bake_truth")["truth_acc_n"] == len(samples) - 1


def test_questions_are_stated_as_their_answers() -> None:
    probe = build("qaedit_truth").test_docs()[0]["probes"][0]["prompt"]
    statement = 'Statement: The answer to the question "Who designed the Fenwick aqueduct?" is: Orsa Lind.'
    assert probe == f"{statement}\nIs the statement true or false?\nAnswer:"


def test_an_object_with_a_period_ends_the_statement() -> None:
    prompts = [probe["prompt"] for probe in build("qaedit_truth").test_docs()[1]["probes"]]
    assert prompts[0].startswith('Statement: The answer to the question "In which city was the painter Jo Marsh born?"')
    request = EditRequest(prompt="{} lies in", subject="Velm", target_new="St. Br.", target_true="Ostmark", case_id="7")
    assert document(request=request)["probes"][0]["prompt"].startswith("Statement: Velm lies in St. Br.\nIs the")
