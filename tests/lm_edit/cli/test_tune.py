"""``lm-edit tune``: its table, the file it writes, and its errors."""

from __future__ import annotations

import json
import re

import pytest
from tiny import CONTEXT_TEMPLATES, build_model, save_tiny

from edit_hooks import load_editor
from edit_hooks.lm.options import EditingOptions
from lm_edit.cli.main import main
from lm_edit.tuning.search import FactScore


def run_verb(tmp_path, out):
    model = ["--pretrained", str(save_tiny(tmp_path, "llama")), "--device", "cpu", "--store", str(tmp_path / "store")]
    facts = ["--edits", "bake", "--data", "mini", "--num-edits", "3", "--skip", "2"]
    search = ["--layers", "0", "1", "--lr", "0.5", "--clamp", "4", "50", "--vary", "kl_factor=0;0.1"]
    shared = ["--editor-args", f"num_steps:3;context_templates:{json.dumps(CONTEXT_TEMPLATES[:1])}"]
    return main(["tune", *model, "--editor", "r_rome", *facts, *search, *shared, "--trials", "4", "--out", str(out)])


def test_the_verb_prints_a_table(tmp_path, capsys):
    out = tmp_path / "best.yaml"
    code = run_verb(tmp_path, out)
    lines = capsys.readouterr().out.strip().split("\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[1:5]]
    assert lines[0].split()[:2] == ["layers", "S"] and all(re.fullmatch(r"\[\d\]", row[0]) for row in rows)
    assert any("as shipped" in line for line in lines[1:5])
    best = float(rows[0][1])
    assert (code, out.exists()) == ((0, True) if best > 0 else (1, False))  # a random model may learn nothing at all


def test_the_verb_writes_settings_that_editor_args_accept(tmp_path, capsys, monkeypatch):
    def score(_self, editor, cases):
        config = editor.default_config(_self.model)
        value = 0.9 if config.layers == [0] else 0.2
        return [FactScore(value, value, value, config.kl_factor) for _ in cases]

    monkeypatch.setattr("lm_edit.tuning.search._Search._score", score)
    out = tmp_path / "best.yaml"
    assert run_verb(tmp_path, out) == 0
    lines = capsys.readouterr().out.strip().split("\n")
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
        (["--trials", "0"], "positive"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, arguments, message):
    """All of them before the model is read."""
    given = [
        "tune",
        "--pretrained",
        str(tmp_path / "nowhere"),
        "--editor",
        "r_rome",
        "--edits",
        "bake",
        "--data",
        "mini",
    ]
    assert main([*given, *arguments]) == 2
    assert message in capsys.readouterr().err
