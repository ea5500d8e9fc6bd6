"""Teacher-forced protocol by hand, on QAEdit's tasks."""

from __future__ import annotations

import pytest
from scripted import ScriptedLM
from task_runs import metrics_of, run


def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
    assert not context.startswith("Please")  # the question alone, without WILD's instruction
    argmax = list(range(len(continuation.split())))
    return -1.0, [*argmax[:-1], 99] if unedited or "Orsa" in continuation else argmax


def test_reliability_is_the_share_of_matching_tokens() -> None:
    lm = ScriptedLM(likelihoods)
    found = metrics_of(run("qaedit_syn_reliability", lm), "qaedit_syn_reliability")
    assert found["efficacy_match"] == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert not any(request.request_type == "generate_until" for request in lm.seen)


def test_locality_compares_with_the_unedited_model() -> None:
    found = metrics_of(run("qaedit_syn_locality", ScriptedLM(likelihoods)), "qaedit_syn_locality")
    assert found["neighborhood_agree_tf"] == pytest.approx((0 + 0.5 + 0.5 + 0.5) / 4)


def test_the_published_subset_costs_one_generation_per_case() -> None:
    lm = ScriptedLM(likelihoods=lambda context, continuation, unedited: (-1.0, [0]), texts=lambda *_: " 1911.")
    found = metrics_of(run("qaedit_syn_generalization", lm, {"population": "wrong_em"}), "qaedit_syn_generalization")
    assert sum(request.request_type == "generate_until" for request in lm.seen) == 4
    assert found["paraphrase_match@wrong_em_excluded"] == 1  # 1911 is the target of one case
