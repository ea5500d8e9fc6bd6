"""A shipped configuration that names a source has the source's values, or its text names the settings that differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from paths import ROOT, TESTS

from edit_hooks.base.registry import editor_class

CONFIGS = ROOT / "edit_hooks/configs"
RELEASED: dict[str, Any] = yaml.safe_load((TESTS / "data/released_settings.yaml").read_text(encoding="utf-8"))

# Words by which a file's text can name a setting, besides the setting itself.
WORDS = {
    "second_moments": "second moments",
    "templates_from": "end-of-text token",
    "num_steps": "single step",
    "gradients": "gradients",
    "chat": "chat template",
}
DEMO = "gemma-3-270m"


class Shipped(NamedTuple):
    """A shipped file: its text, and its settings with the editor's defaults."""

    text: str
    settings: dict[str, Any]


def load(editor: str, name: str) -> Shipped:
    text = (CONFIGS / editor / f"{name}.yaml").read_text(encoding="utf-8")
    config = editor_class(editor).config_class(**yaml.safe_load(text)["config"])
    return Shipped(text, vars(config))


def cases() -> Iterator[Any]:
    for editor, files in RELEASED.items():
        for name, values in files.items():
            if name != "all":
                yield pytest.param(editor, name, {**files["all"], **values}, id=f"{editor}-{name}")


def same(ours: Any, released: Any) -> bool:
    if isinstance(ours, float) and isinstance(released, (int, float)):
        return ours == pytest.approx(released)
    return bool(ours == released)


@pytest.mark.parametrize(("editor", "name", "released"), list(cases()))
def test_values_are_the_sources_or_the_text_says_so(editor: str, name: str, released: dict[str, Any]) -> None:
    text, settings = load(editor, name)
    comments = "\n".join(line for line in text.splitlines() if "#" in line or line.startswith("source:"))
    for key, value in released.items():
        ours = settings.get(key)
        if key == "layers":
            blocks = settings["layers"]
            assert blocks == list(range(blocks[0], blocks[-1] + 1))
            ours = [blocks[0], blocks[-1]]
        if not same(ours, value):
            assert key in comments or WORDS.get(key, key) in comments, f"{key}: {ours!r} here, {value!r} released"


def test_every_file_is_checked() -> None:
    files = {(path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml") if path.stem != DEMO}
    assert files == {(editor, name) for editor, rows in RELEASED.items() for name in rows if name != "all"}


# ------------------------------------------------------------------ the demo model

# What the sources of the demo's files say of other files: editor -> (editor, file, settings that are the same).
SAME_AS: dict[str, list[tuple[str, str, list[str]]]] = {
    "rome": [
        ("rome", "gpt2-xl", ["num_steps", "early_stop_loss", "lr", "second_moments"]),
        ("rome", "llama-2-7b", ["weight_decay"]),
    ],
    "r_rome": [("rome", "gpt2-xl", ["num_steps", "early_stop_loss", "lr"]), ("rome", "llama-2-7b", ["weight_decay"])],
    "alphaedit": [("memit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor"])],
    "evk_edit": [("alphaedit", DEMO, ["layers", "num_steps", "lr", "weight_decay", "clamp_factor"])],
    "emmet": [("memit", DEMO, ["num_steps", "lr", "weight_decay"])],
    "pmet": [
        ("memit", DEMO, ["layers", "num_steps", "weight_decay", "clamp_factor"]),
        ("pmet", "gpt-j-6b", ["lr"]),
        ("pmet", "llama-2-7b", ["kl_factor"]),
    ],
    "bird": [
        ("rome", DEMO, ["layers", "weight_decay", "context_templates"]),
        ("bird", "llama-2-7b", ["beta"]),
    ],
}
CLAIM = re.compile(r"as published|as for|for the demo before|'s for|as ROME's|of Llama 2")


@pytest.mark.parametrize("editor", SAME_AS)
def test_the_demo_has_the_values_that_its_source_names(editor: str) -> None:
    settings = load(editor, DEMO).settings
    for other, name, keys in SAME_AS[editor]:
        theirs = load(other, name).settings
        assert {key: settings[key] for key in keys} == {key: theirs[key] for key in keys}, (other, name)


def test_half_the_steps_are_half_the_steps() -> None:
    assert "half its steps" in load("bird", DEMO).text
    assert 2 * load("bird", DEMO).settings["num_steps"] == load("rome", DEMO).settings["num_steps"]


def test_every_source_of_the_demo_that_names_another_file_is_checked() -> None:
    sources = {path.parent.name: yaml.safe_load(path.read_text())["source"] for path in CONFIGS.glob(f"*/{DEMO}.yaml")}
    assert {editor for editor, source in sources.items() if CLAIM.search(source)} == set(SAME_AS)
