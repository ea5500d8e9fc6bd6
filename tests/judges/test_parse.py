"""Parsers of replies: strict verdict lines, and yes/no answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judges.base import CORRECT, INCORRECT, LABELS
from judges.parse import (
    EMPTY_REPLY,
    LISTED_LABELS,
    REFUSED_REPLY,
    TRUNCATED_REPLY,
    UNPARSABLE_REPLY,
    read_verdict,
    read_yes_no,
    without_thoughts,
)
from judges.prompt import DEFAULT_LABELS


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("A", CORRECT),
        ("B", INCORRECT),
        (" a\n", CORRECT),
        ("b.", INCORRECT),
        ("(A)", CORRECT),
        ("**B**", INCORRECT),
        ('"A"', CORRECT),
        ("`A`.", CORRECT),
        ("A)", CORRECT),
        ("A: correct", CORRECT),
        ("B: INCORRECT", INCORRECT),
        ("B - incorrect.", INCORRECT),
        ("Correct", CORRECT),
        ("INCORRECT", INCORRECT),
        ("Verdict: A", CORRECT),
        ("**Verdict:** B", INCORRECT),
        ("The answer is B", INCORRECT),
        ("Final answer: A.", CORRECT),
        ("Both rivers are named, so it holds.\nA", CORRECT),
        ("A\nOn second thought the Main is wrong.\nB", INCORRECT),
        ("B\n\nThe given answer lacks the Rhine.", INCORRECT),
        ("<think>Is it A? Or B?\nB</think>\n\nA", CORRECT),
        ("A: correct\nB: incorrect\n\nA", CORRECT),  # the prompt's end, then a verdict
        ("A: correct\nB: incorrect\nVerdict: B", INCORRECT),
        ("B\nA", CORRECT),  # not the order of the prompt
    ],
)
def test_a_verdict_line_is_parsed(reply: str, label: str) -> None:
    assert read_verdict(reply, DEFAULT_LABELS) == (label, None)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", EMPTY_REPLY),
        (" \n\t", EMPTY_REPLY),
        ("A or B", UNPARSABLE_REPLY),
        ("AB", UNPARSABLE_REPLY),
        ("C", UNPARSABLE_REPLY),
        ("A: incorrect", UNPARSABLE_REPLY),
        ("B: correct", UNPARSABLE_REPLY),
        ("not correct", UNPARSABLE_REPLY),
        ("Not A", UNPARSABLE_REPLY),
        ("It is correct that this is wrong", UNPARSABLE_REPLY),
        ("A given answer cannot be judged", UNPARSABLE_REPLY),
        ("I'm sorry, but I can't help with that.", UNPARSABLE_REPLY),
        ("As an AI language model, I cannot grade this", UNPARSABLE_REPLY),
        ("correct/incorrect", UNPARSABLE_REPLY),
        ("1", UNPARSABLE_REPLY),
        ("A A", UNPARSABLE_REPLY),
        ("Grade: A+", UNPARSABLE_REPLY),
        ("<think>it must be A\nA", TRUNCATED_REPLY),
        ("A: correct\nB: incorrect", LISTED_LABELS),
        ("A\n\nB", LISTED_LABELS),
        ("Is the given answer correct?\n**A**: correct\n**B**: incorrect\nReply with the letter", LISTED_LABELS),
        ("A\nA: correct\nB: incorrect", LISTED_LABELS),
    ],
)
def test_other_replies_are_unscored(reply: str, reason: str) -> None:
    assert read_verdict(reply, DEFAULT_LABELS) == (None, reason)


def test_the_finish_reason_is_taken_into_account() -> None:
    assert read_verdict("A", DEFAULT_LABELS, finish="length").label == CORRECT
    assert read_verdict("A\nBut then", DEFAULT_LABELS, finish="length").reason == TRUNCATED_REPLY
    assert read_verdict("A", DEFAULT_LABELS, finish="content_filter").reason == REFUSED_REPLY


@given(st.text())
def test_any_reply_gives_a_label_or_a_reason(reply: str) -> None:
    label, reason = read_verdict(reply, DEFAULT_LABELS)
    assert (label in LABELS) != bool(reason)


@given(st.text(st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])), st.sampled_from("AB"))
def test_words_around_a_letter_are_no_verdict(text: str, letter: str) -> None:
    reply = f"some {text} words {letter}"
    assert read_verdict(reply.replace("\r", " "), DEFAULT_LABELS).label is None or len(reply.splitlines()) > 1


@given(st.lists(st.sampled_from(["A", "B", "because", "", "it is A, I think"]), max_size=8))
def test_the_last_verdict_line_wins(lines: list[str]) -> None:
    shown = [line for line in lines if line]
    while shown and shown[-1] not in ("A", "B"):
        shown.pop()
    expected = None if not shown or shown[-2:] == ["A", "B"] else DEFAULT_LABELS[shown[-1]]
    assert read_verdict("\n".join(lines), DEFAULT_LABELS).label == expected


@given(st.sampled_from(["YES", "good", "x1"]), st.sampled_from(["NO", "bad", "y2"]))
def test_other_labels_are_parsed_as_strictly(right: str, wrong: str) -> None:
    labels = {right: CORRECT, wrong: INCORRECT}
    assert read_verdict(f"{wrong}.", labels).label == INCORRECT
    assert read_verdict(right.lower(), labels).label == CORRECT
    assert read_verdict("A", labels).label is None
    assert read_verdict(f"{right}\n{wrong}", labels) == (None, LISTED_LABELS)
    assert read_verdict(f"{right}\n{wrong}", {wrong: INCORRECT, right: CORRECT}).label == INCORRECT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Yes, it is.", True),
        ("no", False),
        ("True", True),
        ("False. Yes?", False),
        ("Not at all", False),
        ("yes and no", None),
        ("Yes, that is false", None),
        ("Yesterday", None),
        ("nothing", None),
        ("It is, yes", None),
        ("", None),
        ("\nYes", True),
    ],
)
def test_yes_or_no(text: str, expected: bool | None) -> None:
    assert read_yes_no(text) is expected


@given(st.text())
def test_yes_or_no_is_never_both(text: str) -> None:
    assert read_yes_no(text) in (True, False, None)
    assert read_yes_no(f"maybe {text}") is None


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("plain", "plain"),
        ("<think>a</think>b<think>\n</think> c", "b c"),
        ("</think> b", "</think> b"),
        ("a <think> b", None),
        ("<thi<think></think>nk> b", None),
        ("<think>" * 200_000, None),  # in linear time
    ],
)
def test_thoughts_are_left_out(reply: str, text: str | None) -> None:
    assert without_thoughts(reply) == text
