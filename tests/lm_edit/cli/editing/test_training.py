"""``lm-edit train``: MEND, SERAC, and an editor of another package."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import lm_eval
import pytest
from paths import RECORDS
from serac_runs import save_encoder
from task_managers import task_manager
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from edit_hooks.editors.mend import MEND
from lm_edit.cli.main import main


def test_the_command_trains_and_the_editor_uses_what_it_made(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama")), tmp_path / "mend"
    arguments = ["--pretrained", path, "--device", "cpu", "--edits", "bake", "--data", "mini", "--num-edits", "12"]
    settings = "layers:[1];rank:8;num_steps:2;accumulate:2;validate_every:1;edit_lr:0.001"
    assert main(["train", "mend", *arguments, "--settings", settings, "--out", str(out)]) == 0
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
    assert main(["train", "serac", *arguments, "--settings", settings, "--out", str(out)]) == 0
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


def test_weights_from_elsewhere_are_imported_and_used(tmp_path, capsys):
    path, out = str(save_tiny(tmp_path, "llama", max_position_embeddings=512)), tmp_path / "serac"
    weights = tmp_path / "weights"
    save_encoder(weights / "classifier")
    small = save_tiny(tmp_path / "small", "llama", max_position_embeddings=512, seed=7)
    shutil.copytree(small, weights / "counterfactual")
    command = ["import", "serac", "--pretrained", path, "--device", "cpu", "--weights", str(weights)]
    assert main([*command, "--settings", "scope_texts:prompts", "--out", str(out)]) == 0
    assert f"editor=serac,editor_args=artifact:{out}" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model_name"] == Path(path).name and manifest["imported"]["weights"] == "weights"
    make = ["edit", "--pretrained", path, "--device", "cpu", "--editor", "serac", "--editor-args", f"artifact:{out}"]
    edits = tmp_path / "edits.jsonl"
    edits.write_text(json.dumps(REQUESTS[0]))
    assert main([*make, "--store", "off", "--edits", str(edits), "--out", str(tmp_path / "e")]) == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [("nowhere", "nowhere"), ("empty", "has no safetensors file"), ("text.safetensors", "cannot be read")],
)
def test_weights_are_checked_before_a_model_is_loaded(weights, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no tensors")
    monkeypatch.setattr("lm_edit.cli.editing.training.load_model", lambda args: pytest.fail("the model is loaded"))
    assert main(["import", "mend", "--weights", str(tmp_path / weights), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


EDITS = ["--edits", "bake", "--data", "mini", "--num-edits", "12"]


def test_an_editor_of_another_package_is_trained_and_used(tmp_path, capsys):
    """Its class names the trainer; nothing here knows the editor."""
    path, out = str(save_tiny(tmp_path, "llama")), tmp_path / "step"
    train = ["train", "step_editor:StepEditor", "--pretrained", path, "--device", "cpu", *EDITS, "--out", str(out)]
    settings = "layers:[1];lr:0.5;accumulate:1;validate_every:4;"
    assert main([*train, "--settings", f"{settings}num_steps:4"]) == 0
    assert f"editor=step_editor:StepEditor,editor_args=artifact:{out}" in capsys.readouterr().out
    assert main([*train, "--settings", f"{settings}num_steps:8"]) == 0  # a finished run goes on
    losses = json.loads((out / "manifest.json").read_text())["losses"]
    assert [record["step"] for record in losses] == [0, 4, 8] and losses[2]["edit"] < losses[0]["edit"]
    editor = load_editor("step_editor:StepEditor", {"artifact": str(out)})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    (delta,) = editor.edit(model, tokenizer, [EditRequest(**REQUESTS[0])])
    assert any(bool(update.any()) for update in delta.weights().values())
    with pytest.raises(EditingError, match="was trained with"):
        load_editor("step_editor:StepEditor", {"artifact": str(out), "layers": [0]}).edit(
            model, tokenizer, [EditRequest(**REQUESTS[0])]
        )


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (None, r"editor 'mend' needs no training; those that do: serac\."),
        ("nowhere:Trainer", "trainer 'nowhere:Trainer': there is no module 'nowhere'"),
        ("edit_hooks.editors.mend:MEND", "edit_hooks.editors.mend:MEND is not a subclass"),
        ("edit_hooks.training.serac.trainer:SERACTrainer", "config_class of .* has to extend MENDConfig"),
    ],
)
def test_a_trainer_that_does_not_fit_is_named(trainer, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MEND, "trainer", trainer)
    assert main(["train", "mend", *EDITS, "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_only_editors_with_a_trainer_are_trained(tmp_path, capsys):
    assert main(["train", "rome", *EDITS, "--out", str(tmp_path / "out")]) == 2
    assert "editor 'rome' needs no training; those that do: mend, serac." in capsys.readouterr().err
