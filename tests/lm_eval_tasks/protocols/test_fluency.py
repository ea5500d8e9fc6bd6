"""Fluency by hand: what is asked, which text is scored, and the difference from the unedited model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scripted import generated

from edit_hooks.answers import FailedAnswer, GeneratedText
from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.asking.probes import CaseAnswers, case_requests
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.protocols import fluency

CASE = Case(EditRequest(prompt="{} is in", subject="Port Elna", target_new="Tarsland", case_id="0"))


def answered(*texts: tuple[str, str], settings: dict[str, Any] | None = None) -> CaseAnswers:
    """Answers to the prompts "a b", one pair (edited, unedited) for each."""
    doc = fluency.fluency_doc(CASE, settings or {}, ["a b"] * len(texts))
    return CaseAnswers(
        doc, [replace(generated(text, "length"), unedited=generated(old, "length")) for text, old in texts]
    )


def scores(answers: CaseAnswers) -> dict[str, Any]:
    names = ("fluency_entropy", "fluency_entropy_unedited", "fluency_entropy_change")
    measures = fluency.score_fluency(answers.doc, answers)
    return {name: evaluate(measures[name]) for name in names}


def test_fluency_by_hand() -> None:
    found = scores(answered((" c a b", " b b b"), (" b b b", " b b b")))
    # a b c a b: bigrams ab bc ca ab -> 1.5 bits, trigrams abc bca cab -> log2 3
    varied = 1.5 / 3 + 2 * math.log2(3) / 3
    # a b b b b: bigrams ab bb bb bb -> 1/4 log2 4 + 3/4 log2 4/3, trigrams abb bbb bbb -> 1/3 log2 3 + 2/3 log2 3/2
    dull = (1 / 2 + 3 / 4 * math.log2(4 / 3)) / 3 + 2 * (math.log2(3) / 3 + 2 / 3 * math.log2(3 / 2)) / 3
    assert found["fluency_entropy"].value == pytest.approx((varied + dull) / 2)  # the mean over the prompts
    assert found["fluency_entropy_unedited"].value == pytest.approx(dull)
    assert found["fluency_entropy_change"].value == pytest.approx((varied - dull) / 2)


def test_the_text_is_prompt_and_continuation_in_normal_form() -> None:
    (probe,) = answered(("\n\n\ufb01ne. End. More", "")).probes
    assert fluency.generated_whole(probe) == "a b fine. End. More"  # nothing stops it, the prompt is part of it
    assert fluency.generated_whole(probe, unedited=True) == "a b"


def test_what_is_asked_is_the_published_decoding() -> None:
    doc = fluency.edit_prompt_doc(CASE, {"generation_seed": 3})
    (probe,) = CaseAnswers(doc, [generated("", "length")]).probes
    assert (probe.probe.prompt, probe.probe.ask, probe.probe.num_draws) == ("Port Elna is in", "both", 1)
    assert probe.probe.decoding == Decoding(
        max_total_tokens=100, until=(), ignore_end=True, sampling=Sampling(temperature=1.0, top_k=5, seed=3)
    )


def test_a_prompt_that_comes_again_is_drawn_again() -> None:
    doc = fluency.fluency_doc(CASE, {"generation_seed": 3}, ["a b", "c d", "a b", "a b"])
    sampled = [request.decoding.sampling for request in case_requests(doc) if request.decoding]
    assert [(one.seed, one.draw) for one in sampled if one] == [(3, 0), (3, 0), (3, 1), (3, 2)]
    assert {probe["ask"] for probe in doc["probes"]} == {"both"}  # so the draws are the same for both models


def test_missing_answers_have_their_reason() -> None:
    none = scores(CaseAnswers(fluency.fluency_doc(CASE, {}, []), [FailedAnswer("placeholder")] * 2))
    assert none["fluency_entropy"].reason == "the record has no generation prompts"
    assert not none["fluency_entropy"].failed
    doc = fluency.fluency_doc(CASE, {}, ["a b"])
    failed = scores(CaseAnswers(doc, [FailedAnswer("edit failed: no such layer")]))
    assert {score.reason for score in failed.values()} == {"edit failed: no such layer"}
    stock = scores(CaseAnswers(doc, [GeneratedText(raw=" c d")]))
    assert "does not report the tokens of a text" in stock["fluency_entropy"].reason
    only_edited = scores(CaseAnswers(doc, [generated(" c d", "length")]))
    assert only_edited["fluency_entropy"].value is not None
    assert "the unedited model's answers" in only_edited["fluency_entropy_change"].reason


def test_settings_fail_before_the_first_edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    with pytest.raises(EditingError, match="punkt_tab of nltk, which are not installed"):
        fluency.edit_prompt_doc(CASE, {"released_tokenizer": True})
    with pytest.raises(EditingError, match="generation_seed is -1"):
        fluency.edit_prompt_doc(CASE, {"generation_seed": -1})
