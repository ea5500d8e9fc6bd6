"""Copies of the templates in docs/templates, under another name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from paths import ROOT

TEMPLATES = ROOT / "docs" / "templates"


def copy_template(template: str, folder: Path, words: Mapping[str, str]) -> Path:
    """Copy a template to a new folder, with words replaced in texts and file names.

    Args:
        template: name of a folder in docs/templates.
        folder: where the copy goes; made with its parents.
        words: word in the template -> its replacement. Longer words are replaced first.
    """
    source = TEMPLATES / template
    pattern = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))

    def replaced(text: str) -> str:
        return pattern.sub(lambda match: words[match[0]], text)

    for path in sorted(source.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        copy = folder / replaced(path.relative_to(source).as_posix())
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder
