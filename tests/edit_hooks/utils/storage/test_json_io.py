"""The strict JSON reader: what it accepts, and that nothing it refuses becomes a value."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.json_io import MAX_DEPTH, json_lines, json_text, parse_json, read_json, read_rows


def test_values_are_those_of_json() -> None:
    assert parse_json('{"a": [1, 2.5, true, null, "\\u00e9\\ud83d\\ude00"]}', "x") == {"a": [1, 2.5, True, None, "é😀"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "x: the key 'a' occurs twice in one object; keep one of them."),
        ('{"b": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        ("1e999", "x: the number 1e999 is too large; a finite number is needed."),
        ("-1e999", "the number -1e999 is too large"),
        ("[NaN]", "x: NaN is not a JSON number; write null or a finite number."),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("9" * 5000, "x: a whole number has too many digits."),
        ("[" * 100_000, "x: the JSON is nested too deeply."),
        ("[" * 200 + "]" * 200, "x: the JSON is nested too deeply."),
        ('{"a":' * 200 + "1" + "}" * 200, "x: the JSON is nested too deeply."),
        ("1" + "0" * 400, "x: a whole number has too many digits."),
        ('"\\ud800"', "half of a surrogate pair"),
        ("{", r"x, column 2: not valid JSON \(.*\)\. Look again\."),
        ("{\n", r"x, line 2, column 1: not valid JSON"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        parse_json(text, "x", advice="Look again.")


def test_files_of_programs_may_hold_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[NaN, 1e999]")
    first, second = read_json(path, finite=False)
    assert math.isnan(first) and math.isinf(second)
    with pytest.raises(EditingError, match="NaN is not"):
        read_json(path)


def test_rows_of_lists_and_lines_with_a_byte_order_mark_and_any_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf [{"a": 1},\r\n{"a": 2}]')
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xe2\x80\xa8"}\r\n')
    assert read_rows(tmp_path / "x.json") == [("x.json, record 0", {"a": 1}), ("x.json, record 1", {"a": 2})]
    lines = [("x.jsonl, record 0 (line 1)", {"a": 1}), ("x.jsonl, record 1 (line 3)", {"a": "\u2028"})]
    assert read_rows(tmp_path / "x.jsonl") == lines


def test_nesting_has_room_for_every_file_of_ours() -> None:
    text = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert json_text(parse_json(text, "x")) == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_what_is_written_is_read_again(content: object) -> None:
    assert parse_json(json_text(content), "x", halves="keep") == content
    assert json_text(content).encode("utf-8")


def test_half_surrogate_pairs_are_written_as_escapes(tmp_path: Path) -> None:
    halves = {"a\ud800": ["\udfff b", {"c": "\u00e9 <\ud800>"}]}
    write_atomically(tmp_path / "x.jsonl", json_lines([halves, halves]))
    assert [row for _, row in read_rows(tmp_path / "x.jsonl")] == [halves, halves]
    text = (tmp_path / "x.jsonl").read_text(encoding="utf-8")
    assert "\\udfff b" in text and "\u00e9" in text
    replaced = {"a\ufffd": ["\ufffd b", {"c": "\u00e9 <\ufffd>"}]}
    assert [row for _, row in read_rows(tmp_path / "x.jsonl", halves="replace")] == [replaced, replaced]
    with pytest.raises(EditingError, match="half of a surrogate pair"):
        read_rows(tmp_path / "x.jsonl", halves="refuse")


def test_other_texts_with_half_surrogate_pairs_are_written_too(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x.md", "| a \ud800 |\n")
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == "| a \\ud800 |\n"


@pytest.mark.parametrize(
    "content, place",
    [
        ({"data": [{"prompt": "a"}]}, "in the list 'data'"),
        ({"1": {"prompt": "a"}, "2": {"prompt": "b"}}, "by their names"),
        ({"prompt": "a", "notes": [{}]}, None),
        ({"requested_rewrite": {"prompt": "a"}}, None),
    ],
)
def test_an_object_around_the_records_is_named(content, place, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    if place is None:
        assert [record for _, record in read_rows(path)] == [content]
        return
    with pytest.raises(EditingError, match=f"one JSON object with the records {place}; .* Write the records alone"):
        read_rows(path)
