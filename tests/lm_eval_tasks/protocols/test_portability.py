"""Portability and locality by kind, by hand, on KnowEdit's tasks and Yao et al.'s."""

from __future__ import annotations

import pytest
from scripted import ScriptedLM
from task_runs import metrics_of, run

PORTABILITY, LOCALITY = "knowedit_portability", "knowedit_locality"


def right_at_first(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
    """Only the first token of a target is right; one-word targets are right altogether. Agreement: see the test."""
    num_tokens = len(continuation.split())
    if "Kessim" in context and "patron" in context:
        return -1.0, [1 if unedited else 0] * num_tokens
    return -1.0, [0] + [99] * (num_tokens - 1)


def test_the_mean_is_over_kinds_then_over_the_records_that_have_any() -> None:
    """Tokens right: Low Bridge 1/2 | Old Ullish 1/2 | Port Elna 1/2 | Tarsland 1, Salt Sea 1/2, and Kessim 1 | none.

    The fourth record has two reasoning questions and one of logical generalization: (3/4 + 1)/2, not (1 + 1/2 + 1)/3.
    """
    found = metrics_of(run(PORTABILITY, ScriptedLM(right_at_first)), PORTABILITY)
    assert found["portability_match"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 2 + (3 / 4 + 1) / 2) / 4)
    assert found["portability_reasoning_match"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert found["portability_logical_generalization_match"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["portability_subject_aliasing_match"] == pytest.approx(1 / 2)
    counts = ("portability_reasoning_match", "portability_subject_aliasing_match")
    assert [(found[f"{name}_n"], found[f"{name}_excluded"]) for name in counts] == [(2, 3), (1, 4)]
    assert (found["portability_match_n"], found["portability_match_failed"]) == (4, 1)
    assert "the record has no portability questions" in found["unscored_reason"]


def test_micro_means_by_kind_are_over_the_questions_of_that_kind() -> None:
    """Reasoning: 1/2 of one record; 1 and 1/2 of another: (1/2 + 1 + 1/2) / 3. The others have one question each."""
    found = metrics_of(run(PORTABILITY, ScriptedLM(right_at_first), {"micro": True}), PORTABILITY)
    assert found["portability_reasoning_match_micro"] == pytest.approx(2 / 3)
    assert found["portability_reasoning_match"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    for kind in ("logical_generalization", "subject_aliasing"):
        assert found[f"portability_{kind}_match_micro"] == found[f"portability_{kind}_match"]
    assert found["portability_match_micro"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 2 + 1 + 1 / 2 + 1) / 6)


def test_locality_is_agreement_over_the_prompts_of_a_kind() -> None:
    """Both prompts about Kessim's patron disagree; all others agree, also where the gold answer is not predicted."""
    found = metrics_of(run(LOCALITY, ScriptedLM(right_at_first)), LOCALITY)
    assert found["neighborhood_agree_tf"] == pytest.approx((1 + 1 + 1 + 0 + 1) / 5)


def test_edit_success_and_generalization_ask_their_own_question() -> None:
    """Targets: Pim Adler, Old Ullish, Brée, Norvania, 1920."""
    for task, metric, question in (
        ("knowedit_edit_success", "efficacy_match", "Who designed Harrow viaduct?"),
        ("knowedit_generalization", "paraphrase_match", "Which engineer drew Harrow viaduct?"),
    ):
        lm = ScriptedLM(right_at_first)
        assert metrics_of(run(task, lm), task)[metric] == pytest.approx((1 / 2 + 1 / 2 + 1 + 1 + 1) / 5)
        assert lm.seen[0].args == (question, " Pim Adler")


def test_one_hop_questions_have_the_answer_that_follows_from_the_counterfactual() -> None:
    lm = ScriptedLM(right_at_first)
    found = metrics_of(run("zsre_portability_one_hop", lm), "zsre_portability_one_hop")
    assert found["portability_match"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 2 + 1) / 4)
    assert lm.seen[0].args == ("Which bridge did the designer of Harrow viaduct build later?", " Low Bridge")
    assert lm.seen[0].doc["edit_requests"][0]["target_new"] == "Pim Adler"
