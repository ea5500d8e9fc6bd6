"""Access to the fields of a record: white space, types, and errors with place and remedy."""

from __future__ import annotations

import pytest

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.fields import Fields

WHERE = "f.json, record 3"


def test_texts_lose_outer_white_space() -> None:
    fields = Fields({"a": {"b": " x "}, "list": [" y", ""]}, WHERE)
    assert fields.text("a.b") == "x"
    assert fields.texts("list") == ["y", ""] and fields.texts("absent") == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("number", r"f\.json, record 3: field 'number' is 1 \(int\); a text is needed"),
        ("blank", "field 'blank' is empty"),
        ("a.b.c", r"field 'a\.b\.c' is missing"),
        ("numbr", "Did you mean 'number'"),
    ],
)
def test_errors_name_place_and_problem(path: str, problem: str) -> None:
    fields = Fields({"number": 1, "blank": " ", "a": {"b": "text"}}, WHERE)
    with pytest.raises(EditingError, match=problem):
        fields.text(path)


def test_long_values_are_shortened() -> None:
    with pytest.raises(EditingError) as caught:
        Fields({"a": ["x" * 1000]}, WHERE).text("a")
    assert len(str(caught.value)) < 150


def test_objects_carry_their_place() -> None:
    first, second = Fields({"list": [{"a": "x"}, {"b": "y"}]}, WHERE).objects("list")
    assert first.text("a") == "x"
    with pytest.raises(EditingError, match=r"f\.json, record 3, list\[1\]: field 'a' is missing"):
        second.text("a")


@pytest.mark.parametrize("value", [[], {}, None])
def test_a_list_of_objects_is_not_empty(value: object) -> None:
    with pytest.raises(EditingError, match="a non-empty list of objects is needed"):
        Fields({"list": value}, WHERE).objects("list")


def test_the_entry_of_a_list_that_is_of_another_type_is_named() -> None:
    long = ["a" * 99] * 5
    with pytest.raises(EditingError, match=r"field 'list\[5\]' is 1 \(int\); a list of texts is needed"):
        Fields({"list": [*long, 1]}, WHERE).texts("list")
    with pytest.raises(EditingError, match=r"field 'list\[1\]' is 'x' \(str\); a list of objects is needed"):
        Fields({"list": [{}, "x"]}, WHERE).objects("list")


def test_a_record_with_other_fields_alone_is_shown() -> None:
    with pytest.raises(EditingError, match=r"is missing\. The record has 'k', 'l', 'm', 'n', 'x', 'y', \.\.\.\. Add"):
        Fields(dict.fromkeys("klmnxyz", "x"), WHERE).text("prompt")


@pytest.mark.parametrize(
    ("needed", "given"),
    [
        ("target_new", "answer"),
        ("target_new", "Object"),
        ("prompt", "question"),
        ("ground_truth", "old_target"),
        ("rephrase_prompt", "paraphrases"),
        ("locality_prompt", "Neighbour-Prompts"),
        ("locality_ground_truth", "loc_ans"),
    ],
)
def test_hints_know_what_people_call_a_field(needed: str, given: str) -> None:
    fields = Fields({given: "x", "note": "y"}, WHERE)
    with pytest.raises(EditingError, match=f"field '{needed}' is missing. Did you mean '{given}'"):
        fields.text(needed)
    ignoring = Fields({given: "x", "note": "y"}, WHERE)
    assert ignoring.optional(needed) is None and ignoring.suggestion(given) == f" Did you mean '{needed}'?"
    assert ignoring.suggestion("note") == ""
