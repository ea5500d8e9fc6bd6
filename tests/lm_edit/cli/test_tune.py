"""``lm-edit tune``: its table, the file it writes, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import printed_lines, run_verb, split_cells

from edit_hooks import load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, build_model
from edit_hooks.lm.options import EditingOptions
from lm_edit.cli.main import main
from lm_edit.tuning.search import FactScore


@pytest.fixture
def run(tiny_path, tmp_path):
    """Run a small search that writes its best settings to a file; returns the exit code."""

    def run_verb(out: Path) -> int:
        model = ["--pretrained", str(tiny_path("llama")), "--device", "cpu", "--store", str(tmp_path / "store")]
        facts = ["--edits", "bake", "--data", "mini", "--num-edits", "3", "--skip", "2"]
        vary = ["--layers", "0", "1", "--lr", "0.5", "--clamp", "4", "50", "--vary", "kl_factor=0;0.1"]
        shared = ["--editor-args", f"num_steps:3;context_templates:{json.dumps(CONTEXT_TEMPLATES[:1])}"]
        return main(["tune", *model, "--editor", "r_rome", *facts, *vary, *shared, "--trials", "4", "--out", str(out)])

    return run_verb


def test_a_search_prints_a_table(run, tmp_path, capsys):
    out = tmp_path / "best.yaml"
    code = run(out)
    lines = printed_lines(capsys)
    rows = [split_cells(line) for line in lines[1:5]]
    assert lines[0].split()[:2] == ["layers", "S"] and all(re.fullmatch(r"\[\d\]", row[0]) for row in rows)
    assert any("as shipped" in line for line in lines[1:5])
    best = float(rows[0][1])
    assert (code, out.exists()) == ((0, True) if best > 0 else (1, False))  # a random model may learn nothing at all


def test_the_best_settings_are_accepted_as_editor_args(run, tmp_path, capsys, monkeypatch):
    def score(_self, editor, cases):
        config = editor.default_config(_self.model)
        value = 0.9 if config.layers == [0] else 0.2
        return [FactScore(value, value, value, config.kl_factor) for _ in cases]

    monkeypatch.setattr("lm_edit.tuning.search._TrialRunner._score_cases", score)
    out = tmp_path / "best.yaml"
    assert run(out) == 0
    lines = printed_lines(capsys)
    assert lines[1].split()[:2] == ["[0]", "0.900"] and lines[-1].startswith(f"written to {out}")
    text = out.read_text()
    assert text.startswith("# r_rome for ") and "3 facts of bake from number 2 on, S 0.900" in text
    options = EditingOptions(editor="r_rome", editor_args=str(out))
    config = load_editor("r_rome", options.overrides).default_config(build_model("llama"))
    assert (config.layers, config.lr, config.num_steps) == ([0], 0.5, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "a"], "3,4,5 4,5,6"),
        (["--vary", "lr"], "name=value;value"),
        (["--num-edits", "1000"], "has 64 facts"),
        (["--trials", "0"], "argument --trials: '0' is not accepted; a positive"),
        (["--skip", "-1"], "argument --skip: '-1' is not accepted"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, arguments, message):
    """Before the model is loaded."""
    model = ["--pretrained", str(tmp_path / "nowhere")]
    assert run_verb(["tune", *model, "--editor", "r_rome", "--edits", "bake", "--data", "mini", *arguments]) == 2
    assert message in capsys.readouterr().err
