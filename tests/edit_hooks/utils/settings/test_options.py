"""Options as text: numbers of edits, editor settings, choices, switches; and YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.options import (
    choice,
    has_text_form,
    inline_settings,
    parse_checkpoints,
    parse_editor_args,
    settings_file,
    switch,
)


def test_a_choice_has_a_default_and_near_misses() -> None:
    assert choice({}, "color", ("red", "blue"), "blue") == "blue"
    assert choice({"color": "red"}, "color", ("red", "blue"), "blue") == "red"
    with pytest.raises(EditingError, match=r"color='blu' is unknown\. Did you mean 'blue'\? Accepted: red, blue"):
        choice({"color": "blu"}, "color", ("red", "blue"), "red")


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("false", False), ("True", True)])
def test_switches_understand_the_command_line(value: Any, expected: bool) -> None:
    assert switch({"generate": value}, "generate", not expected) is expected


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_other_values_of_a_switch_are_errors(value: Any) -> None:
    with pytest.raises(EditingError, match="Accepted: true, false"):
        switch({"generate": value}, "generate", True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ()), ("", ()), (10, (10,)), ("10;100", (10, 100)), ("10:100", (10, 100)), ([1, 2], (1, 2))],
)
def test_checkpoints_are_ascending_numbers(value: object, expected: tuple[int, ...]) -> None:
    assert parse_checkpoints(value) == expected


@pytest.mark.parametrize("value", ["5;x", "10;", "10;5", "5;5", "0;1", True, [1.5]])
def test_other_checkpoints_are_errors(value: object) -> None:
    with pytest.raises(EditingError, match="checkpoints="):
        parse_checkpoints(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {}),
        ("", {}),
        ("{}", {}),
        ({"lr": 0.3}, {"lr": 0.3}),
        ("lr:0.3;layers:[5, 6]", {"lr": 0.3, "layers": [5, 6]}),
        ("lr=0.3; keep = yes", {"lr": 0.3, "keep": True}),
        ("{lr:0.3;num_steps: 10}", {"lr": 0.3, "num_steps": 10}),
        ("{lr: 0.3, num_steps: 10}", {"lr": 0.3, "num_steps": 10}),
        ("base:rome;base_settings:{lr: 0.1}", {"base": "rome", "base_settings": {"lr": 0.1}}),
        ("k:4;n = 2", {"k": 4, "n": 2}),
        ("texts:/data/corpus.json", {"texts": "/data/corpus.json"}),
        ("texts=C:\\data\\corpus.yaml", {"texts": "C:\\data\\corpus.yaml"}),
    ],
)
def test_editor_settings_as_text(value: Any, expected: dict[str, Any]) -> None:
    assert parse_editor_args(value) == expected


@pytest.mark.parametrize("value", ["lr", "[1, 2]", "lr:{", 3, "a.b;c"])
def test_editor_settings_that_are_not_readable(value: Any) -> None:
    with pytest.raises(EditingError, match="editor_args"):
        parse_editor_args(value)


def test_a_file_of_editor_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fast.yaml").write_text("lr: 0.3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_editor_args(str(tmp_path / "fast.yaml")) == parse_editor_args("~/fast.yaml") == {"lr": 0.3}
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, message in [
        ("none", "cannot be read"),
        ("list", "holds list"),
        ("broken", "YAML"),
        ("binary", "UTF-8"),
    ]:
        with pytest.raises(EditingError, match=message):
            parse_editor_args(str(tmp_path / f"{name}.yaml"))
    with pytest.raises(EditingError, match=r"C:/settings\.yaml cannot be read"):
        parse_editor_args("C:/settings.yaml")
    with pytest.raises(EditingError, match=r"icl_args=.*write icl_args="):
        parse_editor_args("k", "icl_args")


TEXTS = [
    *("", " ", "yes", "null", "5", "1e-3", "a;b", "a: b", "#x", "it's", 'say "no"', "C:\\new", "~/x y.yaml", "{}"),
    *(
        "two\nlines",
        "tab\t",
        "Marković 😀",
        "\u2028",
        "\x85",
        "\ufeff",
        "-",
        "a,b]",
        "*",
        "{a: 1}",
        "x.yaml",
        "editor.v-2",
    ),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-6, "ridge": 1e22, "l2": 0.1 + 0.2, "num_steps": 3, "chat": True, "second_moments": None},
        {"low": -1e-300, "high": float("inf"), "base_settings": {"lr": 5e-05, "layers": [3, 4], "modules": {"up": []}}},
        *({"name": text} for text in TEXTS),
        {"texts": TEXTS, "by_text": dict.fromkeys(TEXTS, TEXTS)},
    ],
)
def test_inline_settings_are_read_back(settings):
    text = inline_settings(settings)
    assert parse_editor_args(text) == settings and "\n" not in text
    assert settings_file(text) is None
    assert [type(value) for value in parse_editor_args(text).values()] == [type(value) for value in settings.values()]


def test_plain_values_are_written_plainly():
    settings = {"base": "memit", "lr": 0.5, "layers": [3, 4], "start": "empty", "texts": ["a b"]}
    assert inline_settings(settings) == 'base:memit;lr:0.5;layers:[3, 4];start:empty;texts:["a b"]'


def test_values_without_a_text_form_are_refused():
    for value in (object(), [object()], {"a": object()}, {1: "a"}):
        assert not has_text_form(value)
        with pytest.raises(ValueError, match="no text form"):
            inline_settings({"second_moments": value})
