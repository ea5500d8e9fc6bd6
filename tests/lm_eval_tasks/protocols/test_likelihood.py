"""Likelihood protocol by hand, on BAKE's forward tasks, and its parts on plain cases."""

from __future__ import annotations

import json

import pytest
from scripted import ScriptedLM, scored
from task_runs import from_nlls, metrics_of, run

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.scoring.measures import Score, evaluate
from lm_eval_tasks.protocols import likelihood

REQUEST = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", target_true="Ostmark", case_id="7")


def test_paraphrases_are_averaged_within_a_case_first() -> None:
    table = {
        ("Port Elna, the seat of the government of", "Dravonia"): (1.0, 1.0),
        ("Port Elna serves as capital city of", "Dravonia"): (3.0, 3.0),
        ("The book written by Tilda Quorn is", "The Amber Stair"): (1.0, 1.0),
        ("The product made by Fernhill Ltd is", "Inkwell"): (1.0, 1.0),
    }
    results = run("bake_gs", ScriptedLM(from_nlls(table)))
    found = metrics_of(results, "bake_gs")
    assert found["paraphrase_prob"] == pytest.approx((0.5 + 1 + 1) / 3)  # over prompts it would be 3/4
    assert (found["paraphrase_prob_n"], found["unscored"]) == (3, 1)
    assert json.loads(found["unscored_reason"]) == {"the record has no paraphrase prompts": 1}
    assert results["samples"]["bake_gs"][2]["paraphrase_prob"] is None


def test_locality_wants_the_true_object() -> None:
    prompt = "The parliament of Port Elna belongs to"
    table = {(prompt, "Ostmark"): (1.0, 1.0), (prompt, "Dravonia"): (2.0, 2.0)}

    def texts(context: str, unedited: bool) -> str:
        return " Ostmark." if unedited or context == prompt else " Dravonia."

    found = metrics_of(run("bake_ls", ScriptedLM(from_nlls(table), texts)), "bake_ls")
    assert found["neighborhood_prob"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["neighborhood_agree_gen"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["neighborhood_agree_tf"] == 1.0  # the script's argmax is the gold answer before and after
    assert (found["neighborhood_prob_n"], found["unscored"]) == (3, 1)


def test_match_and_argmax_differ_by_partial_credit() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        argmax = list(range(len(continuation.split())))
        return -1.0, [*argmax[:-1], 99] if "Amber" in continuation else argmax

    found = metrics_of(run("bake_es", ScriptedLM(likelihoods)), "bake_es")
    assert found["efficacy_argmax"] == 0.75
    assert found["efficacy_match"] == pytest.approx((1 + 2 / 3 + 1 + 1) / 4)


def test_a_question_without_a_competitor_has_no_comparison_but_a_match() -> None:
    case = Case(EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk"))
    doc = likelihood.efficacy_doc(case, {"generate": False})
    assert doc["probes"][0]["targets"] == ["Karsk"]
    measures = likelihood.score_efficacy(doc, CaseAnswers(doc, [scored(-1.0, [0])]))
    assert evaluate(measures["efficacy_match"]).value == 1.0
    assert evaluate(measures["efficacy_prob"]) == Score(reason="the record has no old answer to compare with")


def test_an_answer_is_not_compared_with_itself() -> None:
    """It would be wrong whatever the model says, since it is never likelier than itself."""
    same = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk", target_true="Karsk")
    doc = likelihood.efficacy_doc(Case(same), {"generate": False})
    measures = likelihood.score_efficacy(doc, CaseAnswers(doc, [scored(-1.0, [0]), scored(-1.0, [0])]))
    for name in ("efficacy_prob", "efficacy_magnitude"):
        assert evaluate(measures[name]) == Score(reason="the two answers to compare are the same")
    assert evaluate(measures["efficacy_match"]).value == 1.0


def test_the_edit_score_of_a_case_has_one_component_per_factor() -> None:
    neighbor = Question("Brenholt lies in", "Ostmark", "Karsk")
    doc = likelihood.edit_score_doc(Case(REQUEST, neighbors=[neighbor]), {})
    assert [probe["kind"] for probe in doc["probes"]] == ["efficacy", "neighborhood"]
    assert [probe["ask"] for probe in doc["probes"]] == ["edited", "both"]
    assert not any(probe["generate"] for probe in doc["probes"])
    better, worse = scored(-1.0, [0]), scored(-2.0, [1])
    measures = likelihood.score_edit_score(doc, CaseAnswers(doc, [better, worse, better, worse]))
    no_paraphrase = "the record has no paraphrase prompts"
    assert evaluate(measures["edit_score_prob"]) == Score(value=[[1.0], [None], [1.0]], reason=no_paraphrase)
    assert evaluate(measures["edit_score_argmax"]) == Score(value=[[1.0], [None], [1.0]], reason=no_paraphrase)


@pytest.mark.parametrize(("before", "excluded"), [((-2.0, -1.0), False), ((-1.0, -2.0), True), ((-1.0, -1.0), False)])
def test_the_published_filter_excludes_what_the_unedited_model_prefers(
    before: tuple[float, float], excluded: bool
) -> None:
    doc = likelihood.efficacy_doc(Case(REQUEST), {"generate": False})
    answers = CaseAnswers(doc, [_with_unedited(-1.0, before[0]), _with_unedited(-2.0, before[1])])
    probes = answers.of_kind("efficacy")
    measures = likelihood.filter_known(likelihood.contrast_measures("efficacy", probes, "edit prompts"), probes)
    names = ("efficacy_prob", "efficacy_magnitude", "efficacy_argmax", "efficacy_match")
    assert set(measures) == {*names, *(f"{name}@all" for name in names)}
    score = evaluate(measures["efficacy_prob"])
    assert (score.value, score.excluded, score.reason) == (None if excluded else 1.0, excluded, None)
    assert evaluate(measures["efficacy_prob@all"]).value == 1.0


def _with_unedited(logprob: float, unedited: float) -> object:
    from dataclasses import replace

    return replace(scored(logprob, [0]), unedited=scored(unedited, [0]))
