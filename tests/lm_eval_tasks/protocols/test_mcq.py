"""Multiple choice by hand: orders, shares of roles, ties, and position bias."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from paths import ROOT
from scripted import scored
from task_runs import build, metrics_of, run

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import mcq

REQUEST = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", target_true="Ostmark", case_id="7")
ELSEWHERE = EditRequest(prompt="{} lies in", subject="Tarn", target_new="Nord", target_true="Karsk", case_id="8")


def document() -> dict[str, Any]:
    return next(iter(mcq.mcq_docs([Case(REQUEST), Case(ELSEWHERE)], {})))


def test_every_role_is_at_every_position_once() -> None:
    doc = document()
    assert [(option["role"], option["text"]) for option in doc["options"]] == [
        ("new", "Karsk"),
        ("old", "Ostmark"),
        ("other", "Nord"),
        ("none", "none of these"),
    ]
    assert [probe["targets"] for probe in doc["probes"]] == [list("ABCD"), list("BCDA"), list("CDAB"), list("DABC")]
    assert doc["probes"][1]["prompt"] == (
        "Which option completes the sentence?\nSentence: Velm lies in ...\n"
        "A. none of these\nB. Karsk\nC. Ostmark\nD. Nord\nAnswer:"
    )
    for probe in doc["probes"]:
        lines = probe["prompt"].splitlines()
        for letter, option in zip(probe["targets"], doc["options"], strict=True):
            assert f"{letter}. {option['text']}" in lines


def choosing(nll: Callable[[int, int, str], float]) -> dict[str, float]:
    """Scores from (order, role, letter) -> NLL in the edited model; the unedited one always prefers D."""
    doc = document()
    answers = [
        replace(
            scored(-nll(order, role, letter), [0]),
            unedited=scored(-1.0 if letter == "D" else -2.0, [0]),
        )
        for order, probe in enumerate(doc["probes"])
        for role, letter in enumerate(probe["targets"])
    ]
    measures = mcq.score_mcq(doc, CaseAnswers(doc, answers))
    return {name.removeprefix("mcq_"): evaluate(measure).value for name, measure in measures.items()}


def test_the_worked_example() -> None:
    found = choosing(lambda order, role, letter: 1.0 if letter == "AADD"[order] else 2.0)
    # order 0: A is role 0; order 1: A is role 3; order 2: D is role 1; order 3: D is role 0
    assert (found["new"], found["old"], found["other"], found["none"]) == (0.5, 0.25, 0.0, 0.25)
    assert found["position_bias"] == 0.5  # letters 1/2, 0, 0, 1/2: (1/4 * 4) / 2
    assert found["new_unedited"] == 0.25


@pytest.mark.parametrize("letter", "ABCD")
def test_one_letter_has_chance_and_the_largest_bias(letter: str) -> None:
    found = choosing(lambda order, role, shown: 1.0 if shown == letter else 2.0)
    assert [found[role] for role in ("new", "old", "other", "none")] == [0.25] * 4
    assert found["position_bias"] == 0.75


@pytest.mark.parametrize(("role", "name"), list(enumerate(["new", "old", "other", "none"])))
def test_one_role_has_all_and_no_bias(role: int, name: str) -> None:
    found = choosing(lambda order, shown, letter: 1.0 if shown == role else 1.001)
    assert found[name] == 1.0 and found["position_bias"] == 0.0


def test_tied_letters_share_the_choice() -> None:
    found = choosing(lambda order, role, letter: 1.0 if role < 2 else 2.0)
    assert (found["new"], found["old"], found["none"]) == (0.5, 0.5, 0.0)
    assert choosing(lambda order, role, letter: 1.0)["new"] == 0.25


def test_the_bias_of_independent_uniform_choices_is_the_documented_one() -> None:
    everything = list(itertools.product("ABCD", repeat=4))
    biases = [
        choosing(lambda order, role, letter, chosen=chosen: 1.0 if letter == chosen[order] else 2.0)["position_bias"]
        for chosen in everything
    ]
    mean = math.fsum(biases) / len(everything)
    # E|n/4 - 1/4| for n ~ Bin(4, 1/4) is 2 P(n = 0) / 4 = 0.75**4 / 2; four letters, halved
    assert mean == pytest.approx(0.75**4)
    text = (ROOT / "docs/benchmarks/questions.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"independent uniform choices have ([\d.]+) on average", text)
    assert f"{mean:.3f}" == documented


def test_questions_have_two_answers_of_other_records() -> None:
    docs = build("qaedit_mcq").test_docs()
    assert all([option["role"] for option in doc["options"]] == ["new", "other", "other", "none"] for doc in docs)
    assert docs[0]["probes"][0]["prompt"].startswith("Question: Who designed the Fenwick aqueduct?\nA. Orsa Lind\nB. ")
    found = metrics_of(run("qaedit_mcq"), "qaedit_mcq")
    assert found["mcq_new"] + found["mcq_other"] + found["mcq_none"] == pytest.approx(1.0)
    assert "mcq_old" not in found


def test_no_option_is_listed_twice() -> None:
    for task in ("bake_mcq", "qaedit_mcq"):
        for doc in build(task, data="mini").test_docs():
            texts = [option["text"].lower() for option in doc["options"]]
            assert len(set(texts)) == 4


def test_without_a_third_object_the_case_is_unscored() -> None:
    doc = next(iter(mcq.mcq_docs([Case(REQUEST)], {})))
    measures = mcq.score_mcq(doc, CaseAnswers(doc, [scored(-1.0, [0])]))
    reason = "the record has no third option: too few other objects in the data"
    assert {evaluate(measure).reason for measure in measures.values()} == {reason}
