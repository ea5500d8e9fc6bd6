"""``lm-edit train-mend``."""

from __future__ import annotations

import json

from edit_hooks import Delta
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from lm_edit.cli.main import main


def test_the_command_trains_and_the_editor_uses_what_it_made(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama")), tmp_path / "mend"
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", "bake", "--data", "mini", "--num-edits", "12"]
    settings = "layers:[1];rank:8;num_steps:2;accumulate:2;validate_every:1;edit_lr:0.001"
    assert main(["train-mend", *arguments, "--settings", settings, "--out", str(out)]) == 0
    assert "validation edit loss" in capsys.readouterr().out
    edits = tmp_path / "edits.jsonl"
    edits.write_text(json.dumps(REQUESTS[0]))
    editor = ["--editor", "mend", "--editor-args", f"artifact:{out}", "--store", "off"]
    make = [
        "edit",
        "--pretrained",
        path,
        "--device",
        "cpu",
        *editor,
        "--edits",
        str(edits),
        "--out",
        str(tmp_path / "e"),
    ]
    assert main(make) == 0
    (file,) = (tmp_path / "e").glob("*.safetensors")
    assert Delta.load(file).is_low_rank
