"""Measures: answers of every form to a value or a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText, ScoredContinuation
from judges.base import Verdict
from lm_eval_tasks.common.asking.answers import read_answer
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Unscored


def answer(logprob: float = -2.0, **changes: Any) -> ScoredContinuation:
    """A likelihood as `edited_hf` reports it, for a target of the tokens 7, 8."""
    fields = {"token_ids": (7, 8), "token_logprobs": (logprob / 2,) * 2, "token_argmax": (7, 9)} | changes
    return ScoredContinuation(logprob=logprob, is_greedy=False, **fields)


def test_answers_of_edited_hf_keep_tokens_and_the_unedited_answer() -> None:
    read = read_answer(EditedAnswer(final=answer(unedited=answer(-4.0, token_argmax=(1, 9)))))
    assert isinstance(read, ScoredContinuation) and read.unedited is not None
    assert measures.nll(read) == 1.0
    assert measures.nll(read, unedited=True) == 2.0
    assert measures.tf_match(read) == 0.5
    assert measures.agree_tf(read) == 0.5
    assert measures.tf_exact(read) == 0.0


@pytest.mark.parametrize("raw", [(-2.0, True), [-2.0, True]])
def test_stock_pairs_give_argmax_and_a_reason_for_the_rest(raw: Any) -> None:
    read = read_answer(raw)
    assert measures.tf_exact(read) == 1.0
    for measure in (measures.nll, measures.tf_match, measures.agree_tf):
        with pytest.raises(Unscored, match=r"--model edited_hf .*mode=none"):
            measure(read)


def test_generations_are_cut_and_keep_the_raw_text() -> None:
    unedited = GeneratedText(raw="\n", token_ids=(3,))
    raw = EditedAnswer(final=GeneratedText(raw=" Rome. Yes", token_ids=(1, 2), stop="length", unedited=unedited))
    for form, after in ((raw, " Rome"), (" Rome. Yes", " Rome")):
        read = read_answer(form, [".", "\n"])
        assert isinstance(read, GeneratedText)
        assert (read.text, read.raw, str(read)) == (after, " Rome. Yes", after)
        assert measures.generated_match(read, "Rome") == 1.0
    read = read_answer(raw, [".", "\n"])
    assert measures.generated_match(read, "Rome", unedited=True) == 0.0
    assert (measures.agree_gen(read), measures.both_empty(read)) == (0.0, 0.0)
    with pytest.raises(Unscored, match="edited_hf"):
        measures.agree_gen(read_answer(" Rome", ["."]))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (EditedAnswer(final=FailedAnswer("edit failed: no tokens")), "edit failed: no tokens"),
        ({"logprob": -1.0}, "unreadable answer of type dict"),
        (None, "unreadable answer of type NoneType"),
        ((1.0, True, 3), "unreadable answer of type tuple"),
    ],
)
def test_unusable_answers_are_unscored_with_the_reason(raw: Any, reason: str) -> None:
    read = read_answer(raw)
    assert isinstance(read, FailedAnswer) and reason in read.reason
    for measure in (measures.nll, measures.tf_exact, measures.agree_gen, measures.judged_correct):
        with pytest.raises(Unscored, match=reason):
            measure(read)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "logits are not finite"),
        (float("inf"), "log-probability is inf"),
        (float("-inf"), "log-probability is -inf"),
    ],
)
def test_broken_likelihoods_are_unscored_not_wrong(value: float, reason: str) -> None:
    for measure in (measures.nll, measures.tf_match, measures.tf_exact):
        with pytest.raises(Unscored, match=reason):
            measure(read_answer(answer(value)))
    with pytest.raises(Unscored, match=reason):
        measures.agree_tf(read_answer(answer(unedited=answer(value))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_unscored(value: float) -> None:
    assert measures.evaluate(lambda: value) == measures.Score(reason=f"value is {value}", failed=True)


def test_the_wrong_kind_of_answer_is_named() -> None:
    with pytest.raises(Unscored, match="answer is a GeneratedText"):
        measures.nll(read_answer("text"))
    with pytest.raises(Unscored, match="answer is a ScoredContinuation"):
        measures.agree_gen(read_answer((-1.0, True)))


def test_verdicts_are_scores_or_reasons() -> None:
    assert measures.judged_correct(Verdict(label="correct")) == 1.0
    assert measures.judged_correct(Verdict(label="incorrect")) == 0.0
    with pytest.raises(Unscored, match="judge: reply was empty"):
        measures.judged_correct(Verdict(unscored_reason="reply was empty"))


def test_a_filter_decides_before_the_measure() -> None:
    """A failed edit of an excluded case is no failure; where the filter cannot tell, the measure's reason is first."""

    def unscored(reason: str = "no probe") -> float:
        raise Unscored(reason)

    def failed() -> float:
        raise measures.Failed("edit failed")

    def scores(measure: measures.Measure) -> list[measures.Score]:
        filters = (lambda: False, lambda: True, lambda: unscored("no helper"))
        return [measures.evaluate(measures.exclude_if(measure, is_excluded)) for is_excluded in filters]

    excluded = measures.Score(excluded=True)
    assert scores(lambda: 0.5) == [measures.Score(value=0.5), excluded, measures.Score(reason="no helper")]
    assert scores(unscored) == [measures.Score(reason="no probe"), excluded, measures.Score(reason="no probe")]
    failure = measures.Score(reason="edit failed", failed=True)
    assert scores(failed) == [failure, excluded, failure]


def test_the_unedited_answer_survives_a_failed_edit() -> None:
    before = GeneratedText(raw="Rome. And")
    answered = EditedAnswer(final=FailedAnswer("edit failed: NaN", unedited=before))
    assert EditedAnswer.from_json(json.loads(str(answered))) == answered
    read = read_answer(answered, ["."])
    assert measures.generated_text(read, unedited=True).text == "Rome"
    with pytest.raises(measures.Failed, match="edit failed: NaN"):
        measures.generated_text(read)
    scored = FailedAnswer("edit failed: NaN", unedited=answer(-4.0))
    assert measures.nll(scored, unedited=True) == 2.0
    with pytest.raises(measures.Failed, match="edit failed: NaN"):
        measures.nll(scored)


def test_an_unfinished_thought_is_a_failure_of_the_edited_model_only() -> None:
    thinking = GeneratedText(raw="", unfinished=True)
    score = measures.evaluate(lambda: measures.generated_match(thinking, "Rome"))
    assert score.failed and "think_end_token" in str(score.reason)
    before = GeneratedText(raw="Rome", token_ids=(1,), unedited=thinking)
    assert not measures.evaluate(lambda: measures.agree_gen(before)).failed


def test_the_mean_over_no_probe_is_unscored() -> None:
    assert measures.evaluate(measures.mean_over([], "paraphrase prompts", lambda answered: 1.0)) == measures.Score(
        reason="the record has no paraphrase prompts"
    )


def test_one_item_decides_whether_the_others_have_an_answer_or_not() -> None:
    """``None`` is a missing answer. Any: a 1 decides; all: a 0 decides; only without one is the value unknown."""

    def holds(item: int | None) -> int:
        if item is None:
            raise measures.Failed("no room")
        return item

    for items in ([None, 1], [1, None], [0, 1]):
        assert measures.any_true(items, holds) is True
    for items in ([None, 0], [0, None], [1, 0]):
        assert measures.all_true(items, holds) is False
    assert measures.any_true([0, 0], holds) is False and measures.all_true([1, 1], holds) is True
    for unknown in (lambda: measures.any_true([None, 0], holds), lambda: measures.all_true([1, None], holds)):
        with pytest.raises(measures.Failed, match="no room"):
            unknown()
