"""Verdicts and coverage."""

from __future__ import annotations

from typing import Any

import pytest

from judges.base import CORRECT, CoverageError, Report, Verdict, count_reasons


def test_low_coverage_is_an_error() -> None:
    report = Report(judge="j", num_items=10, num_scored=9, reasons={"x": 1})
    report.require(0.9)
    with pytest.raises(CoverageError, match=r"scored 9 of 10 answers \(90.0%\), less than min_coverage=91%.*x \(1\)"):
        report.require(0.91)
    Report(judge="j", num_items=0, num_scored=0).require(1.0)


@pytest.mark.parametrize(
    ("is_stored", "kept"), [(True, "in the verdict store; the next run requests only"), (False, "no reply is kept")]
)
def test_low_coverage_names_what_is_kept(is_stored: bool, kept: str) -> None:
    with pytest.raises(CoverageError, match=kept):
        Report(judge="j", num_items=2, num_scored=1, reasons={"x": 1}, is_stored=is_stored).require(1.0)


def report_of(replies: int, **more: Any) -> str:
    """The message for four answers, half of them scored, with a number of replies without a verdict."""
    reply = "I \x1b[2J would\nrather" + " not" * 99
    facts = {"num_items": 4, "num_scored": 2, "reasons": {"x": 2}, "num_unreadable": replies, "unreadable_reply": reply}
    with pytest.raises(CoverageError) as caught:
        Report(judge="j", **facts, **more).require(1.0)
    return str(caught.value)


def test_a_reply_without_a_verdict_is_shown_with_the_remedies() -> None:
    message = report_of(2)
    assert (
        r"without a verdict: 'I \x1b[2J would\nrather not" in message and "\n" not in message and "\x1b" not in message
    )
    assert "[...]" in message and len(message) < 700
    assert "are not requested again" in message and "the next run requests" not in message
    assert "max_reply_tokens" in message and "ask_again=unscored (--ask-again unscored)" in message
    mixed = report_of(1)
    assert "are not requested again" in mixed and "the next run requests only the missing ones" in mixed
    unstored = report_of(2, is_stored=False)
    assert "are not requested again" not in unstored and "no reply is kept" in unstored and "ask" not in unstored


def test_a_verdict_has_a_label_or_a_reason() -> None:
    assert str(Verdict(label=CORRECT)) == CORRECT
    assert str(Verdict(unscored_reason="no reply")) == "[unscored: no reply]"
    for fields in ({}, {"label": CORRECT, "unscored_reason": "x"}, {"unscored_reason": ""}):
        with pytest.raises(ValueError, match="a label or an unscored_reason"):
            Verdict(**fields)
    with pytest.raises(ValueError, match=r"'right' is unknown\. Accepted: correct, incorrect"):
        Verdict(label="right")


def test_reasons_are_counted_most_frequent_first() -> None:
    reasons = ["b", "c", "a", "c"]
    verdicts = [Verdict(label=CORRECT), *(Verdict(unscored_reason=reason) for reason in reasons)]
    assert list(count_reasons(verdicts).items()) == [("c", 2), ("a", 1), ("b", 1)]
