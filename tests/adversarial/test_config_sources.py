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
# A source that is somebody's file or paper; "chosen for the demo" and "none published" are none.
CLAIM = re.compile(r"release|EasyEdit|MEND's|ROME's|paper|Mirage|BAKE|rewrite")


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


def test_every_file_that_claims_a_source_is_checked() -> None:
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        source = yaml.safe_load(path.read_text(encoding="utf-8"))["source"]
        own = re.match(r"none published|chosen|lm-edit tune|blocks by depth", source) or "for the demo" in source
        claims = CLAIM.search(source) and not own
        checked = path.stem in RELEASED.get(path.parent.name, {})
        assert checked or not claims, f"{path.relative_to(ROOT)}: {source}"
