"""Scoring primitives: hand-computed cases, and properties that hold for every text."""

from __future__ import annotations

import json
import string
from typing import Any

import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText, ScoredContinuation, truncate
from judges import match
from judges.base import Verdict
from lm_eval_tasks.common import measures, scoring
from lm_eval_tasks.common.answers import read_answer
from lm_eval_tasks.common.measures import Unscored

CASES = json.loads((paths.CASES / "scoring.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['function']}-{json.dumps(case['args'])}"[:60])
def test_worked_example(case: dict[str, Any]) -> None:
    functions = {**vars(match), **vars(scoring), "truncate": truncate}
    function = functions[case["function"]]
    expected = case["expected"]
    if isinstance(expected, float):
        expected = pytest.approx(expected, abs=case.get("tolerance", 1e-12))
    assert function(*case["args"]) == expected


def test_every_primitive_has_a_worked_example() -> None:
    for module in (match, scoring):
        defined = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert defined and defined <= {case["function"] for case in CASES}


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("mean_nll", (-1.0, 0)),
        ("share_equal", ([], [])),
        ("share_equal", ([1], [1, 2])),
        ("harmonic_mean", ([],)),
        ("harmonic_mean", ([-1.0],)),
    ],
)
def test_primitives_refuse_what_has_no_answer(function: str, args: tuple) -> None:
    with pytest.raises(ValueError, match="got"):
        getattr(scoring, function)(*args)


@given(st.text())
def test_normalize_is_idempotent_on_ascii_and_leaves_no_punctuation(text: str) -> None:
    once = match.normalize(text)
    assert not set(once) & set(string.punctuation)
    assert once == " ".join(once.split())
    # str.lower() can need two rounds outside ASCII (U+0130 gives a combining dot), so idempotence is claimed for ASCII.
    if text.isascii():
        assert match.normalize(once) == once


@given(st.text(), st.text())
def test_exact_match_is_symmetric_and_never_matches_nothing(left: str, right: str) -> None:
    assert match.exact_match(left, right) == match.exact_match(right, left)
    assert not match.exact_match("", right)


@given(st.text(alphabet="ab.\n "), st.lists(st.sampled_from([".", "\n", "ab", ""]), max_size=3))
def test_truncate_cuts_at_the_first_stop_and_nowhere_else(text: str, stops: list[str]) -> None:
    cut = truncate(text, stops)
    assert text.startswith(cut)
    assert not any(stop in cut for stop in stops if stop)
    assert cut == text or any(text[len(cut) :].startswith(stop) for stop in stops if stop)
    assert truncate(cut, stops) == cut


# ------------------------------------------------------------------ reading answers


def answer(logprob: float = -2.0, **changes: Any) -> ScoredContinuation:
    """A likelihood as `edited_hf` reports it, for a target of the tokens 7, 8."""
    fields = {"token_ids": (7, 8), "token_logprobs": (logprob / 2,) * 2, "token_argmax": (7, 9)} | changes
    return ScoredContinuation(logprob=logprob, is_greedy=False, **fields)


def test_answers_of_edited_hf_keep_tokens_and_the_unedited_answer() -> None:
    read = read_answer(EditedAnswer(final=answer(unedited=answer(-4.0, token_argmax=(1, 9)))))
    assert isinstance(read, ScoredContinuation) and read.unedited is not None
    assert measures.nll(read) == 1.0
    assert measures.nll(read, unedited=True) == 2.0
    assert measures.match(read) == 0.5
    assert measures.agree_tf(read) == 0.5
    assert measures.argmax(read) == 0.0


@pytest.mark.parametrize("raw", [(-2.0, True), [-2.0, True]])
def test_stock_pairs_give_argmax_and_a_reason_for_the_rest(raw: Any) -> None:
    read = read_answer(raw)
    assert measures.argmax(read) == 1.0
    for measure in (measures.nll, measures.match, measures.agree_tf):
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
    for measure in (measures.nll, measures.argmax, measures.agree_gen, measures.verdict):
        with pytest.raises(Unscored, match=reason):
            measure(read)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_likelihoods_are_unscored_not_wrong(value: float) -> None:
    for measure in (measures.nll, measures.match, measures.argmax):
        with pytest.raises(Unscored, match="log-probability is"):
            measure(read_answer(answer(value)))
    with pytest.raises(Unscored, match="log-probability is"):
        measures.agree_tf(read_answer(answer(unedited=answer(value))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_unscored(value: float) -> None:
    assert measures.evaluate(lambda: value) == measures.Score(reason=f"value is {value}")


def test_the_wrong_kind_of_answer_is_named() -> None:
    with pytest.raises(Unscored, match="answer is a GeneratedText"):
        measures.nll(read_answer("text"))
    with pytest.raises(Unscored, match="answer is a ScoredContinuation"):
        measures.agree_gen(read_answer((-1.0, True)))


def test_verdicts_have_a_label_or_a_reason() -> None:
    assert measures.verdict(Verdict(label="correct")) == 1.0
    assert measures.verdict(Verdict(label="incorrect")) == 0.0
    with pytest.raises(Unscored, match="judge: reply was empty"):
        measures.verdict(Verdict(unscored_reason="reply was empty"))
    for bad in ({"label": "CORRECT"}, {}, {"label": "correct", "unscored_reason": "both"}):
        with pytest.raises(ValueError, match="verdict"):
            Verdict(**bad)
