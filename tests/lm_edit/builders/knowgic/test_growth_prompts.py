"""Prompts of ``lm-edit grow-graph``, and the parsers of replies: worked cases, hostile texts, properties."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from graph_world import parse_prompt
from hypothesis import given
from hypothesis import strategies as st

from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import Relation
from lm_edit.builders.knowgic.growth_prompts import (
    UnusableReply,
    extraction_chat,
    parse_triplets,
    parse_wording,
    reasoning_chat,
    split_sentences,
    wording_chat,
)
from lm_edit.builders.replies import MAX_NAME, MAX_REPLY, is_usable

FACT = Fact("Ada Moss", "school", "Elmwood")


# ------------------------------------------------------------------ triplets


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        ('[["a", "b", "c"]]', [("a", "b", "c")]),
        (
            'Sure! Here:\n```json\n[["a", "b", "c"],\n ["d", "e", "f"]]\n```\nDone [1].',
            [("a", "b", "c"), ("d", "e", "f")],
        ),
        ("[]", []),
        ("No facts: [].", []),
        ('[[" a  b ", "c\\n", "d"]]', [("a b", "c", "d")]),
        ('[["[x", "b", "c"], ["a", "b", "c"]]', [("a", "b", "c")]),  # a bracket in a name
        ("", None),
        ("none", None),
        ('["a", "b", "c"]', None),
        ('[["a", "b"]]', None),
        ('[["a", "b", "c", "d"]]', None),
        ('[["a", "b", 3]]', None),
        ('[["a", "b", null]]', None),
        ('[["a", "b", "c"], "d"]', None),
        ('[{"subject": "a", "relation": "b", "object": "c"}]', None),
        ('{"facts": [["a", "b", "c"]]}', [("a", "b", "c")]),  # around the list is ignored
        ('[["a", "b", "c"]] or [["a", "b", "d"]]', None),  # which one is not decided
        ("[['a', 'b', 'c']]", None),
        ('[["a", "b", "c"]', None),
        ('[["a", "b", "c"],]', None),
        ('[[["a", "b", "c"]]]', None),
        ("[" + "9" * 5000 + "]", None),
    ],
)
def test_triplets_of_a_reply(reply: str, facts: list[Any] | None) -> None:
    extracted = parse_triplets(reply)
    assert (None if extracted is None else extracted.facts) == facts


@pytest.mark.parametrize("name", ["", " ", "x" * (MAX_NAME + 1), "<|im_end|>", "a{}", "\ud800", "\x1b[31m", "\ue000"])
def test_names_that_no_question_can_hold_are_counted(name: str) -> None:
    extracted = parse_triplets(json.dumps([["a", "b", name], ["a", "b", "Zürich"], [name, "b", "c"]]))
    assert extracted is not None and (extracted.facts, extracted.num_unusable) == ([("a", "b", "Zürich")], 2)


def test_a_huge_reply_is_refused_at_once() -> None:
    start = time.perf_counter()
    for text in ("[" * MAX_REPLY, "[" * 10**7, "[[" * (MAX_REPLY // 2), '[["a",' * (MAX_REPLY // 6), "[1]" * 6000):
        assert parse_triplets(text) is None
    many = json.dumps([["a", "b", "c"]] * 10**5)
    assert len(many) > MAX_REPLY and parse_triplets(many) is None
    assert time.perf_counter() - start < 20


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(st.text() | st.text(alphabet='[]",ab \\u{}') | JSON.map(json.dumps) | st.builds("{} {}".format, JSON, JSON))
def test_the_parser_never_raises_and_returns_triplets_only(text: str) -> None:
    extracted = parse_triplets(text)
    for fact in extracted.facts if extracted else ():
        assert isinstance(fact, Fact) and len(fact) == 3 and all(map(is_usable, fact))
    assert isinstance(parse_wording(text, FACT), (Relation, UnusableReply))
    assert all(sentence.strip() for sentence in split_sentences(text))


ROWS = st.lists(st.lists(st.text(max_size=8), min_size=3, max_size=3), max_size=4)


@given(ROWS, st.text(alphabet="ab .\n"), st.booleans())
def test_what_is_written_as_asked_is_read(rows: list[list[str]], around: str, is_ascii: bool) -> None:
    extracted = parse_triplets(around + json.dumps(rows, ensure_ascii=is_ascii) + around)
    assert extracted is not None and len(extracted.facts) + extracted.num_unusable == len(rows)
    cleaned = [tuple(" ".join(part.split()) for part in row) for row in rows]
    assert extracted.facts == [row for row in cleaned if all(map(is_usable, row))]


# ------------------------------------------------------------------ wordings


def wording(question: str, statement: str) -> str:
    return json.dumps({"question": question, "statement": statement})


GOOD = "Which school had Ada Moss?"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (wording(GOOD, "Ada Moss went to Elmwood."), ("{} went to", "Which school had {}?")),
        (wording(GOOD, "The school of Ada Moss is Elmwood"), ("The school of {} is", "Which school had {}?")),
        (
            "```json\n" + wording(GOOD, "Ada Moss's school is  Elmwood!") + "\n```",
            ("{}'s school is", "Which school had {}?"),
        ),
        (wording(GOOD, "Ada Moss went to school"), "the statement does not end with the object"),
        (wording(GOOD, "Ada Moss went to NewElmwood"), "the statement does not end with the object"),
        (wording(GOOD, "She went to Elmwood"), "the statement does not have the subject exactly once"),
        (wording(GOOD, "Ada Moss, I say Ada Moss, went to Elmwood"), "the statement does not have the subject"),
        (wording(GOOD, "Ada Moss Elmwood"), "and words beside it"),
        (wording(GOOD, "Elmwood had Ada Moss: Elmwood"), "the object occurs twice in the statement"),
        (wording("Where is Elmwood of Ada Moss?", "Ada Moss went to Elmwood"), "the object occurs in the question"),
        (wording("Was Elm College for Ada Moss?", "Ada Moss went to Elmwood"), "the object occurs in the question"),
        (wording("Where was she?", "Ada Moss went to Elmwood"), "the subject does not occur exactly once"),
        (wording("Where was Ada Mossy?", "Ada Moss went to Elmwood"), "the subject does not occur exactly once"),
        (wording("Where was Ada Moss.", "Ada Moss went to Elmwood"), "does not end with a question mark"),
        (wording("{Ada Moss}?", "Ada Moss went to Elmwood"), "brackets or markup"),
        (wording("Where was Ada Moss" + "e" * 300 + "?", "Ada Moss went to Elmwood"), "too long"),
        (wording("", "Ada Moss went to Elmwood"), "empty"),
        ('{"question": 3, "statement": "x"}', "is not one JSON object"),
        ('{"question": "Where?"}', "is not one JSON object"),
        (wording(GOOD, "Ada Moss went to Elmwood") * 2, "is not one JSON object"),
        ("Ada Moss went to Elmwood", "is not one JSON object"),
        ("{" * 15_000, "is not one JSON object"),
    ],
)
def test_wordings_of_a_reply(reply: str, expected: Any) -> None:
    parsed = parse_wording(reply, FACT, ["Elm College"])
    if isinstance(expected, tuple):
        assert parsed == expected
    else:
        assert isinstance(parsed, UnusableReply) and expected in parsed.problem


def test_an_object_within_the_subject_or_around_it() -> None:
    state = Fact("New York", "in", "New York State")
    assert parse_wording(wording("Where is New York?", "New York lies in New York State"), state) == (
        "{} lies in", "Where is {}?"
    )  # fmt: skip
    capital = Fact("Ada Moss", "home", "Washington D.C.")
    reply = wording("Where does Ada Moss live?", "Ada Moss lives in Washington D.C.")
    assert parse_wording(reply, capital) == ("{} lives in", "Where does {} live?")


# ------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("response", "sentences"),
    [
        ("Bo is tall. Elm is a town!  Is it so?", ["Bo is tall.", "Elm is a town!", "Is it so?"]),
        ("1. Bo is tall.\n2) Elm is old.\n\n- Fir is green\n* **Gum** is blue.", [
            "Bo is tall.", "Elm is old.", "Fir is green", "Gum is blue."
        ]),
        ("Step 1: Bo is tall.\n**Step 2:** Elm is old.", ["Bo is tall.", "Elm is old."]),
        ("### Facts\nBo is tall.", ["Bo is tall."]),
        ("J. K. Rowe wrote it. Dr. Ames met Mr. Bo.", ["J. K. Rowe wrote it.", "Dr. Ames met Mr. Bo."]),
        ("It has 3.5 parts, e.g. Elm. The rest is new.", ["It has 3.5 parts, e.g. Elm.", "The rest is new."]),
        ('He said "Bo is tall." Then he left us.', ['He said "Bo is tall."', "Then he left us."]),
        ("Bo is tall. Bo is tall.", ["Bo is tall."]),
        ("Sure. Well then!", []),
        ("", []),
    ],
)  # fmt: skip
def test_sentences_of_a_response(response: str, sentences: list[str]) -> None:
    assert split_sentences(response) == sentences
    if len(sentences) > 1:
        assert split_sentences(response, is_cut=True) == sentences[:-1]


def test_a_huge_response_is_cut_in_time() -> None:
    start = time.perf_counter()
    for text in ("Bo is tall. " * 10**5, "A. " * 10**6, "- " * 10**6, "Bo is \u201d." * 10**5, " " * 10**6 + "x"):
        assert sum(map(len, split_sentences(text))) <= MAX_REPLY
    assert time.perf_counter() - start < 20


# ------------------------------------------------------------------ prompts


@given(st.text(), st.text())
def test_every_inserted_text_is_one_quoted_line(first: str, second: str) -> None:
    """A careful reader finds exactly the inserted texts; outside of the fixed wording no markup arises."""
    (extraction,), (reasoning,) = extraction_chat(first, second), reasoning_chat(second)
    assert parse_prompt(extraction["content"]) == ("extraction", first)
    assert parse_prompt(reasoning["content"]) == ("reasoning", second)
    assert "<|" not in extraction["content"] + reasoning["content"]


@given(st.tuples(st.text(), st.text(), st.text()), st.lists(st.text(), max_size=2))
def test_a_wording_prompt_holds_the_triplet_and_the_earlier_questions(fact: Any, questions: list[str]) -> None:
    (message,) = wording_chat(Fact(*fact), [UnusableReply(question, "it is of no use") for question in questions])
    kind, (found, num_earlier) = parse_prompt(message["content"])
    assert (kind, found, num_earlier) == ("wording", fact, len(questions))
