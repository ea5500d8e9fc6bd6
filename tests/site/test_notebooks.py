"""Notebooks of the site: without outputs, with one cell of installation, of code that compiles."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / f"docs/notebooks/{name}").read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_a_notebook_is_stored_without_outputs_and_can_be_installed(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    texts = ["".join(cell["source"]) for cell in code]
    assert [number for number, text in enumerate(texts) if "%pip install" in text] == [0]
    for text in texts[1:]:
        ast.parse(text)
    first = "".join(cells(name)[0]["source"])
    assert cells(name)[0]["cell_type"] == "markdown" and first.startswith("# ")


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_what_a_notebook_imports_from_this_project_exists(name: str) -> None:
    for cell in cells(name):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or "%pip" in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("edit_hooks", "lm_edit"):
                module = __import__(str(node.module), fromlist=["*"])
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_there_are_four_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare-editors", "first-edit", "own-editor", "what-an-edit-breaks"]
