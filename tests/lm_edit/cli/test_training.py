"""``lm-edit train-mend`` and ``train-serac``."""

from __future__ import annotations

import json

import lm_eval
from paths import RECORDS
from serac_runs import save_encoder
from task_managers import task_manager

from edit_hooks import Delta
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from lm_edit.cli.main import main


def test_the_command_trains_and_the_editor_uses_what_it_made(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama")), tmp_path / "mend"
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", "bake", "--data", "mini", "--num-edits", "12"]
    settings = "layers:[1];rank:8;num_steps:2;accumulate:2;validate_every:1;edit_lr:0.001"
    assert main(["train-mend", *arguments, "--settings", settings, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "training edits: 11, validation edits: 1\n" in printed and "validation edit loss" in printed
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


def test_serac_is_trained_and_used_by_lm_eval(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama", max_position_embeddings=512)), tmp_path / "serac"
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", "bake", "--data", "mini", "--num-edits", "12"]
    encoder = save_encoder(tmp_path / "encoder")
    settings = f"classifier:{encoder};num_steps:1;accumulate:1;validate_every:1;edits_per_example:4"
    assert main(["train-serac", *arguments, "--settings", settings, "--out", str(out)]) == 0
    assert f"editor=serac,editor_args=artifact:{out}" in capsys.readouterr().out
    results = lm_eval.simple_evaluate(
        model="edited_hf",
        model_args=f"pretrained={path},device=cpu,store=off,editor=serac,editor_args=artifact:{out}",
        tasks=["bake_es"],
        task_manager=task_manager({"data": str(RECORDS / "bake_qa.jsonl")}),
        limit=2,
        bootstrap_iters=0,
    )
    assert results["results"]["bake_es"]["unscored,none"] == 0
    assert results["config"]["edited_hf"]["editor"] == "serac"
    make = ["edit", "--pretrained", path, "--device", "cpu", "--editor", "serac", "--editor-args", f"artifact:{out}"]
    edits = tmp_path / "edits.jsonl"
    edits.write_text(json.dumps(REQUESTS[0]))
    assert main([*make, "--store", "off", "--edits", str(edits), "--out", str(tmp_path / "e")]) == 0
    (file,) = (tmp_path / "e").glob("*.safetensors")
    assert Delta.load(file).contexts[0].memory.artifact == str(out)
