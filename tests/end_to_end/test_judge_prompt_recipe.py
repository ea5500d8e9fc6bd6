"""The recipe for a judge prompt, followed in a copy of the folder of prompts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from judge_server import grade_by_equality, serve
from paths import ROOT

from judges import prompt as judge_prompt
from judges.base import Item
from judges.evaluation.quality import PAIRS
from lm_edit.cli.main import main

RECIPE = (ROOT / "docs/project/recipes.md").read_text(encoding="utf-8").split("## A judge prompt")[1].split("\n## ")[0]
WORDING = """---
name: correctness
version: 2
labels: {RIGHT: correct, WRONG: incorrect}
---
Reply with RIGHT or WRONG.

Item
Question: {question}
Expected: {gold}
Given: {answer}
"""


def grade(item: Item, attempt: int) -> str:
    return "RIGHT" if grade_by_equality(item, attempt) == "A" else "WRONG"


def test_a_new_version_is_one_file_and_its_agreement_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(judge_prompt.PROMPT_FOLDER, tmp_path / "prompts")
    (folder / "correctness_v2.txt").write_text(WORDING, encoding="utf-8")
    monkeypatch.setattr(judge_prompt, "PROMPT_FOLDER", folder)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(PAIRS.read_text(encoding="utf-8").splitlines()[::12]), encoding="utf-8")
    with serve(grade) as server:
        words = ["judge-quality", "--judge", f"openai:m@{server.url}", "--prompt", "correctness_v2"]
        assert main([*words, "--pairs", str(pairs), "--store", str(tmp_path / "store")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("m (correctness_v2)"))
    accuracy, precision, _, coverage = map(float, row.split()[2:6])
    assert coverage == precision == 1.0 and 0.5 < accuracy < 1.0


def test_the_recipe_names_the_files_and_the_command() -> None:
    for words in ("`judges/prompts/<name>_v<number>.txt`", "`tests/judges/test_prompt.py`", "lm-edit judge-quality"):
        assert words in RECIPE
