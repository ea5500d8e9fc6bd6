"""Answers survive their JSON text, which any tool can read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.answers import (
    FORMAT,
    IMMEDIATE,
    ContextReport,
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ScoredContinuation,
    StateSimilarity,
    StreamPosition,
)
from edit_hooks.edit_report import Cost, EditReport, Effects, StreamStep
from edit_hooks.utils.errors import EditingError

numbers = st.floats(allow_nan=False) | st.sampled_from([math.inf, -math.inf])
tokens = st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(tuple)
contexts = st.none() | st.builds(ContextReport, facts=st.integers(0, 3), cut=st.booleans())


@st.composite
def scored(draw: Any, unedited: bool = True) -> ScoredContinuation:
    ids = draw(st.none() | tokens)
    return ScoredContinuation(
        logprob=draw(numbers),
        is_greedy=draw(st.booleans()),
        token_ids=ids,
        token_logprobs=None if ids is None else tuple(draw(numbers) for _ in ids),
        token_argmax=None if ids is None else ids[::-1],
        context=draw(contexts),
        unedited=draw(st.none() | scored(unedited=False)) if unedited else None,
    )


@st.composite
def generated(draw: Any, unedited: bool = True) -> GeneratedText:
    return GeneratedText(
        raw=draw(st.text()),
        token_ids=draw(st.none() | st.lists(st.integers(0, 9)).map(tuple)),
        stop=draw(st.none() | st.sampled_from(["eos", "stop_string", "length"])),
        context=draw(contexts),
        unedited=draw(st.none() | generated(unedited=False)) if unedited else None,
    )


similarities = st.builds(StateSimilarity, cosine=numbers) | st.builds(StateSimilarity, overlap=numbers)
answers = scored() | generated() | similarities
reports = st.builds(
    EditReport,
    editor=st.none() | st.text(),
    key=st.none() | st.text(min_size=1),
    error=st.none() | st.text(min_size=1),
    step=st.none() | st.builds(StreamStep, step=st.integers(0, 9), num_edits=st.integers(0, 9), finite=st.booleans()),
    effects=st.builds(
        Effects, first_token_kl=st.none() | numbers, target_nlls=st.lists(st.tuples(numbers, numbers)).map(tuple)
    ),
    cost=st.builds(Cost, seconds=st.none() | numbers),
    warnings=st.lists(st.text()).map(tuple),
    diagnostics=st.dictionaries(st.text("abc", min_size=1), st.integers() | st.text() | st.booleans()),
)
positions = st.builds(
    StreamPosition, edited=st.booleans(), step=st.none() | st.integers(0, 9), num_edits=st.integers(0, 9)
)
steps = st.integers(0, 99)
stages = st.dictionaries(steps | steps.map(str) | st.just(IMMEDIATE), answers, max_size=4)


@given(
    st.builds(
        EditedAnswer,
        final=answers | st.builds(FailedAnswer, reason=st.text()),
        edit=st.none() | reports,
        position=st.none() | positions,
        stages=stages,
    )
)
def test_an_answer_survives_its_json_text(answer: EditedAnswer) -> None:
    record = json.loads(str(answer), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["format"] == FORMAT
    assert EditedAnswer.from_json(record) == answer


def test_a_missing_answer_that_is_no_failure_comes_back_as_such() -> None:
    for is_failure in (True, False):
        answer = EditedAnswer(final=FailedAnswer("not asked", is_failure=is_failure))
        assert EditedAnswer.from_json(json.loads(str(answer))) == answer
    assert EditedAnswer.from_json({"format": FORMAT, "error": "of earlier releases"}).final.is_failure


def test_facts_that_json_lacks_come_back_as_numbers() -> None:
    diagnostics = {"final_loss": math.inf, "parts": [{"norm": -math.inf}], "name": "nano"}
    report = EditReport(editor="a", effects=Effects(first_token_kl=math.nan, wrecked=True), diagnostics=diagnostics)
    text = str(EditedAnswer(final=GeneratedText(raw="b"), edit=report))
    found = EditedAnswer.from_json(json.loads(text)).edit
    assert found is not None and math.isnan(found.effects.first_token_kl)
    assert found.diagnostics == diagnostics and found.effects.wrecked is True


def test_diagnostics_with_names_of_the_report_are_none_of_its_facts() -> None:
    """A saved edit of another hand may have any; an ``error`` among them made it a failed edit."""
    report = EditReport(diagnostics={"error": 0.1, "step": 3, "num_edits": 1, "num_requests": "two", "parts": 2})
    read = EditReport.from_json(report.to_json())
    assert (read.error, read.step) == (None, None)
    assert report.optimization.num_edits == read.optimization.num_edits == 1


def test_numbers_that_json_lacks_are_texts_and_come_back() -> None:
    answer = EditedAnswer(final=ScoredContinuation(logprob=math.nan, is_greedy=False))
    assert json.loads(str(answer))["answer"]["logprob"] == "nan"
    back = EditedAnswer.from_json(json.loads(str(answer))).final
    assert isinstance(back, ScoredContinuation) and math.isnan(back.logprob)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "format None"),
        ({"format": "lm-eval-editing/answer/9"}, "answer/9"),
        ({"format": FORMAT}, "KeyError"),
        ({"format": FORMAT, "answer": {"kind": "drawn"}}, "unknown kind"),
        ({"format": FORMAT, "answer": {"kind": "generated", "raw": "x", "colour": 1}}, "colour"),
        ({"format": FORMAT, "answer": {"kind": "scored", "logprob": "low", "is_greedy": True}}, "cannot be read"),
        (
            {
                "format": FORMAT,
                "answer": {
                    "kind": "scored",
                    "logprob": -1.0,
                    "is_greedy": True,
                    "token_ids": [1, 2],
                    "token_argmax": [1],
                },
            },
            "one per token",
        ),
    ],
)
def test_damaged_answers_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        EditedAnswer.from_json(record)


def test_the_natural_stop_cuts_the_text_and_keeps_the_raw_one() -> None:
    answer = GeneratedText(raw=" Rome. It is old", unedited=GeneratedText(raw="Oslo\nBergen")).until([".", "\n"])
    assert (answer.text, answer.raw) == (" Rome", " Rome. It is old")
    assert answer.unedited is not None and answer.unedited.text == "Oslo"
