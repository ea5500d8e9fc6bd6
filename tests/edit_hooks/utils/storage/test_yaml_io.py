"""The YAML reader: aliases within bounds, no code, no silent choice between two values."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.yaml_io import line_of, parse_yaml, read_yaml


def test_anchors_and_merge_keys_within_bounds() -> None:
    text = "base: &b {lr: 0.3, steps: 5}\nfast: {<<: *b, steps: 2}\n"
    assert parse_yaml(text) == {"base": {"lr": 0.3, "steps": 5}, "fast": {"lr": 0.3, "steps": 2}}
    assert parse_yaml("") is None


def test_escapes_of_json_are_one_character() -> None:
    """A settings file that a program wrote as JSON; as two halves the text could not be written again."""
    assert parse_yaml('{"\\ud83d\\ude00": ["a\\ud83d\\ude00", "\\u00e9"]}') == {"\U0001f600": ["a\U0001f600", "\u00e9"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "the key 'a' occurs twice"),
        ("b: {a: 1, a: 2}", "the key 'a' occurs twice"),
        ("a: &a [*a]", "an alias refers to itself"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: " + "[" * 200 + "]" * 200, "nested too deeply"),
        ("a: 0x" + "9" * 5000, "too many digits"),
        ("a: 2001-99-99", "month must be in"),
        ("a: b\0", "special characters"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("? {a: b}\n: c", "unhashable"),
        ('a: "\\ud83d"', "half of a surrogate pair"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_an_alias_bomb_is_counted_and_never_built() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a: &a [" + ",".join("x" * 9) + "]"]
    lines += [f"{after}: &{after} [{','.join([f'*{name}'] * 9)}]" for name, after in pairwise(names)]
    with pytest.raises(ValueError, match="more than 100000 values"):
        parse_yaml("\n".join(lines))


def test_messages_do_not_quote_the_line(tmp_path: Path) -> None:
    """It may hold a key."""
    path = tmp_path / "judge.yaml"
    path.write_text("api_key: sk-secret: x")
    with pytest.raises(EditingError, match=r"not valid YAML: mapping values are not allowed here \(line 1") as caught:
        read_yaml(path)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ((), 1),
        (("a",), 2),
        (("b", "c"), 4),
        (("b", "d", 1), 7),
        (("b", "d", 1, "e"), 8),
        (("b", "d", 2), 5),  # missing: the line of what holds it
        (("b", "x", "y"), 3),
        (("a", 0), 2),
    ],
)
def test_line_of_an_entry(keys: tuple[str | int, ...], line: int) -> None:
    text = "# comment\na: 1\nb:\n  c: 2\n  d:\n    - 3\n    - f: 4\n      e: 5\n"
    assert line_of(text, keys) == line
