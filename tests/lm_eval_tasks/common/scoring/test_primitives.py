"""Scoring primitives: worked examples from tests/cases/scoring.json, and properties that hold for every text."""

from __future__ import annotations

import json
import string
from typing import Any

import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.answers import truncate
from judges import match, squad
from lm_eval_tasks.common.scoring import primitives as scoring

CASES = json.loads((paths.CASES / "scoring.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['function']}-{json.dumps(case['args'])}"[:60])
def test_worked_example(case: dict[str, Any]) -> None:
    functions = {**vars(squad), **vars(match), **vars(scoring), "truncate": truncate}
    function = functions[case["function"]]
    expected = case["expected"]
    if isinstance(expected, float):
        expected = pytest.approx(expected, abs=case.get("tolerance", 1e-12))
    assert function(*case["args"]) == expected


def test_every_primitive_has_a_worked_example() -> None:
    for module in (match, scoring):
        defined = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        defined = {name for name in defined if not name.startswith("_")}
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
