"""Negation by hand: frames, the worked example of docs/benchmarks/questions.md, and the competitor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import ScriptedLM, scored
from task_runs import build, from_nlls, metrics_of, run

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import negation

REQUEST = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", target_true="Ostmark", case_id="7")


def test_frames_wrap_the_whole_prompt() -> None:
    (doc,) = negation.negation_docs([Case(REQUEST)], {})
    assert [(probe["kind"], probe["prompt"], probe["targets"]) for probe in doc["probes"]] == [
        ("affirmed", "This statement is true: Velm lies in", ["Karsk", "Ostmark"]),
        ("affirmed", "It is correct to say: Velm lies in", ["Karsk", "Ostmark"]),
        ("negated", "This statement is false: Velm lies in", ["Ostmark", "Karsk"]),
        ("negated", "It is wrong to say: Velm lies in", ["Ostmark", "Karsk"]),
        (
            "held",
            "Statement: Velm lies in Karsk.\nIs the statement true or false?\nAnswer:",
            ["True", "False"],
        ),
        (
            "denied",
            'Statement: It is not true that this statement holds: "Velm lies in Karsk."\n'
            "Is the statement true or false?\nAnswer:",
            ["False", "True"],
        ),
    ]
    assert {probe["ask"] for probe in doc["probes"]} == {"both"}
    assert (doc["competitor"], doc["other"]) == ("Ostmark", None)


def test_questions_are_framed_as_questions() -> None:
    request = EditRequest(prompt="Who built {}?", subject="{prompt} Hall", target_new="Orsa", case_id="0")
    other = EditRequest(prompt="Who painted {}?", subject="Velm", target_new="Lind", case_id="1")
    doc, _ = negation.question_negation_docs([Case(request), Case(other)], {})
    prompts = [probe["prompt"] for probe in doc["probes"]]
    assert prompts[2] == "Question: Who built {prompt} Hall?\nWrong answer:"  # braces of the text stay
    assert prompts[1] == "Give an answer that is correct.\nQuestion: Who built {prompt} Hall?\nAnswer:"
    assert 'The answer to the question "Who built {prompt} Hall?" is: Orsa.' in prompts[4]
    assert doc["competitor"] == "Lind"
    assert doc["other"] == {"objects": ["Lind"], "drawn_from": "first word", "seed": 0}


def answered(table: list[tuple[float, float]], before: list[tuple[float, float]] | None = None) -> CaseAnswers:
    """Answers from (NLL of the first target, of the second) per probe, one token each; edited and unedited."""
    (doc,) = negation.negation_docs([Case(REQUEST)], {})
    answers = []
    for after, unedited in zip(table, before or table, strict=True):
        for nll, first in zip(after, unedited, strict=True):
            answer, plain = scored(-nll, [0]), scored(-first, [0])
            answers.append(replace(answer, unedited=plain))
    return CaseAnswers(doc, answers)


# (new, competitor) in A1 and A2, (competitor, new) in N1 and N2, (True, False), (False, True)
EXAMPLE = [(1.0, 4.0), (1.0, 2.0), (2.0, 3.0), (3.0, 1.0), (1.0, 2.0), (1.0, 2.0)]


def values(answers: CaseAnswers) -> dict[str, float]:
    return {name: evaluate(measure).value for name, measure in negation.score_negation({}, answers).items()}


def test_the_worked_example() -> None:
    # m(A1) = 4 - 1 = 3, m(A2) = 2 - 1 = 1, m(N1) = 2 - 3 = -1, m(N2) = 3 - 1 = 2
    found = values(answered(EXAMPLE))
    assert found["negation_prob"] == 0.5  # N1 passed, N2 not
    assert found["negation_pair_prob"] == 0.5  # A1 and N1 passed; A2 passed, N2 not
    assert found["negation_shift"] == pytest.approx(((3 - -1) + (1 - 2)) / 2)
    assert (found["negation_verdict"], found["negation_affirmed"]) == (1.0, 0.0)


def test_the_unedited_columns_read_the_unedited_answers() -> None:
    before = [(4.0, 1.0), (2.0, 1.0), (1.0, 4.0), (1.0, 2.0), (2.0, 1.0), (1.0, 2.0)]
    found = values(answered(EXAMPLE, before))
    # before: m(A) = -3, -1 and m(N) = 1 - 4 = -3, 1 - 2 = -1: no shift, no pair, and the new fact is called false
    assert found["negation_pair_prob_unedited"] == found["negation_shift_unedited"] == 0.0
    assert found["negation_verdict_unedited"] == 0.0
    assert found["negation_pair_prob"] == 0.5


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # the new object in every frame, as a parrot; any label
        ([(1, 2), (1, 2), (2, 1), (2, 1), (1, 2), (2, 1)], {"pair_prob": 0, "prob": 0, "shift": 0, "affirmed": 1}),
        # the competitor in every frame, as without an edit
        ([(2, 1), (2, 1), (1, 2), (1, 2), (2, 1), (1, 2)], {"pair_prob": 0, "prob": 1, "shift": 0, "affirmed": 0}),
        # always True, always False, ties
        ([(1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (2, 1)], {"verdict": 0, "affirmed": 1, "pair_prob": 1, "shift": 2}),
        ([(1, 2), (1, 2), (1, 2), (1, 2), (2, 1), (1, 2)], {"verdict": 0, "affirmed": 0}),
        ([(1, 1)] * 6, {"verdict": 0, "affirmed": 0, "pair_prob": 0, "prob": 0, "shift": 0}),
    ],
)
def test_one_sided_models_pass_nothing(table: list[tuple[float, float]], expected: dict[str, float]) -> None:
    found = values(answered(table))
    assert {name: found[f"negation_{name}"] for name in expected} == expected


def test_through_lm_eval_per_token() -> None:
    """Likelihoods are per token: the longer object is not punished."""
    prompt = "Tilda Quorn is the author of"
    new, true = "The Amber Stair", "Low Tide"  # 3 and 2 words
    table = {
        (f"This statement is true: {prompt}", new): (1.0, 3.0),
        (f"This statement is true: {prompt}", true): (1.2, 1),
    }
    samples = run("bake_negation", ScriptedLM(from_nlls(table)))["samples"]["bake_negation"]
    # sums are 3 and 2.4 nats; A1: 1.2 - 1 = 0.2; all other margins are 2 - 2 = 0
    assert samples[1]["negation_shift"] == pytest.approx(0.2 / 2)
    assert samples[1]["negation_shift_unedited"] == pytest.approx(-2 / 2)


def test_without_any_competitor_the_case_is_unscored(tmp_path: Path) -> None:
    record = {"id": 0, "prompt": "Who built Velm?", "target": "Orsa", "subject": "Velm", "rephrase": "Velm's builder?"}
    path = tmp_path / "one.json"
    path.write_text(json.dumps([record | {"locality": [{"loc": "who sang", "loc_ans": "Lind"}]}]), encoding="utf-8")
    results = run("qaedit_negation", settings={"data": str(path)})
    found = metrics_of(results, "qaedit_negation")
    assert (found["negation_pair_prob"], found["unscored"]) == (None, 1)
    assert "no competing object" in found["unscored_reason"]


def test_a_failed_edit_is_counted() -> None:
    results = run("bake_negation", ScriptedLM(errors={"1": "no such layer"}))
    found = metrics_of(results, "bake_negation")
    assert found["negation_pair_prob_failed"] == 1 and found["negation_pair_prob_n"] == 3


def test_the_mini_sets_draw_objects_of_the_right_form() -> None:
    for task, sources in (("bake_mcq", {"relation"}), ("qaedit_negation", {"template", "first word", "digits"})):
        docs = build(task, data="mini").test_docs()
        assert {doc["other"]["drawn_from"] for doc in docs} == sources
