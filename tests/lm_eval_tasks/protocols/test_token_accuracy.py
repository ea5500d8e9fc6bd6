"""Token accuracy by hand, on ZsRE's tasks in MEMIT's flavor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from scripted import ScriptedLM, StockLM, scored
from task_runs import build, metrics_of, run

from edit_hooks.answers import EditedAnswer
from edit_hooks.utils.errors import EditingError

EFFICACY, PARAPHRASE, SPECIFICITY = "zsre_memit_efficacy", "zsre_memit_paraphrase", "zsre_memit_specificity"


class TwoForms(ScriptedLM):
    """Every word is a token. With prompts of their own all tokens are right but the first, along the target the last.

    The unedited model is wrong at the first and the last token.
    """

    def _answer(self, request: Instance, answer: Any) -> EditedAnswer:
        self.seen.append(request)
        ids = list(range(len(request.args[1].split())))
        by_token = "token_prompts" in request.doc["asked"]
        final = scored(-1.0, [99, *ids[1:]] if by_token else [*ids[:-1], 99])
        if request.doc["asked"]["model"] != "edited":
            unedited = [99, *ids[1:]]
            final = replace(final, unedited=scored(-1.0, [*unedited[:-1], 98]))
        return EditedAnswer(final=final)


def test_both_forms_are_means_over_tokens_then_cases() -> None:
    """True answers: Mira Solano; Tarnish; Sôme; Norvania; 1908: two tokens, then one each."""
    lm = TwoForms()
    found = metrics_of(run(EFFICACY, lm), EFFICACY)
    assert found["efficacy_token_acc"] == pytest.approx((1 / 2 + 0 + 0 + 0 + 0) / 5)
    assert found["efficacy_match"] == pytest.approx((1 / 2 + 0 + 0 + 0 + 0) / 5)
    assert found["efficacy_argmax"] == 0.0  # of two tokens one is right
    asked = [(request.args, request.doc["asked"].get("token_prompts")) for request in lm.seen[:2]]
    assert asked == [
        (("Who designed Harrow viaduct?", " Mira Solano"), "as_decoded"),
        (("Who designed Harrow viaduct?", " Mira Solano"), None),
    ]


def test_specificity_is_accuracy_against_the_gold_answer_and_agreement_another_column() -> None:
    """Gold answers: 1874; Mina Kell; the Ull; green; Ivo Lunt, after a question mark."""
    lm = TwoForms()
    found = metrics_of(run(SPECIFICITY, lm), SPECIFICITY)
    assert found["neighborhood_token_acc"] == pytest.approx((0 + 1 / 2 + 1 / 2 + 0 + 1 / 2) / 5)
    assert found["neighborhood_match"] == pytest.approx((0 + 1 / 2 + 1 / 2 + 0 + 1 / 2) / 5)
    assert found["neighborhood_argmax"] == 0.0
    # [0, 99] against [99, 98], and [99] against [98]
    assert found["neighborhood_agree_tf"] == 0.0
    assert {request.args[0] for request in lm.seen} >= {"nq question: when did the north canal open?"}
    asked = [(request.doc["asked"]["model"], "token_prompts" in request.doc["asked"]) for request in lm.seen[:2]]
    assert asked == [("edited", True), ("both", False)]  # the unedited model is asked only where its answer counts


def test_a_column_of_one_form_never_reads_the_other() -> None:
    class OnlyAlong(TwoForms):
        def _answer(self, request: Instance, answer: Any) -> EditedAnswer:
            reply = super()._answer(request, answer)
            right = "token_prompts" not in request.doc["asked"]
            ids = list(range(len(request.args[1].split())))
            return replace(reply, final=scored(-1.0, ids if right else [99] * len(ids)))

    found = metrics_of(run(EFFICACY, OnlyAlong()), EFFICACY)
    assert (found["efficacy_token_acc"], found["efficacy_match"], found["efficacy_argmax"]) == (0.0, 1.0, 1.0)


TARGETS = [["Mira", "Solano"], ["Tarnish"], ["Sôme"], ["Norvania"], ["1908"]]  # the true answers, one word per token


@given(wrong=st.sets(st.sampled_from([word for target in TARGETS for word in target])), wrong_alone=st.booleans())
@example(wrong={"Solano"}, wrong_alone=False)  # one of two tokens: EVK's equation 15 counts nothing
def test_argmax_counts_the_cases_in_which_every_token_along_the_target_is_right(
    wrong: set[str], wrong_alone: bool
) -> None:
    """For any wrong words, ``_argmax`` is the share of cases without one, whatever the form with own prompts gives."""

    class Wrong(ScriptedLM):
        def _answer(self, request: Instance, answer: Any) -> EditedAnswer:
            alone = "token_prompts" in request.doc["asked"]
            ids = [
                99 if (wrong_alone if alone else word in wrong) else place
                for place, word in enumerate(request.args[1].split())
            ]
            return EditedAnswer(final=scored(-1.0, ids))

    for task, prefix in ((EFFICACY, "efficacy"), (PARAPHRASE, "paraphrase")):
        found = metrics_of(run(task, Wrong()), task)
        shares = [sum(word not in wrong for word in target) / len(target) for target in TARGETS]
        assert found[f"{prefix}_argmax"] == pytest.approx(sum(share == 1.0 for share in shares) / 5)
        assert found[f"{prefix}_match"] == pytest.approx(sum(shares) / 5)
        assert found[f"{prefix}_argmax"] <= found[f"{prefix}_match"]
        assert found[f"{prefix}_token_acc"] == float(not wrong_alone)


def test_a_stock_model_scores_the_exact_match_and_leaves_the_shares_unscored_with_the_reason() -> None:

    def likelihoods(context: str, target: str, unedited: bool) -> tuple[float, list[int]]:
        return -1.0, [0, 1] if target == " Mira Solano" else [int(target == " Tarnish")]

    lm = StockLM(likelihoods=likelihoods)
    results = run(EFFICACY, lm)
    found = metrics_of(results, EFFICACY)
    assert found["efficacy_token_acc"] is None and found["efficacy_match"] is None
    assert (found["efficacy_argmax"], found["efficacy_argmax_n"]) == (4 / 5, 5)
    assert "does not report token ids" in found["unscored_reason"]


def test_the_white_space_of_the_prompts_is_a_setting() -> None:
    (first, *_) = build(EFFICACY, token_prompts="extra_space").test_docs()
    assert [probe.get("token_prompts") for probe in first["probes"]] == ["extra_space", None]
    with pytest.raises(EditingError, match="token_prompts='none'"):
        build(EFFICACY, token_prompts="none")
