"""One line names the origin of an editor's settings, and the results hold it."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from lm_runs import BAKE, build, run
from mend_runs import trainer
from model_shapes import MODELS, model_like
from random_deltas import random_delta

from edit_hooks import load_editor
from edit_hooks.base import origin as origins
from edit_hooks.contract.tiny_models import EDIT_LAYER, REQUESTS, build_model, build_tokenizer
from edit_hooks.deltas.saving.export import export_peft
from edit_hooks.editors.ft_m import FTM
from edit_hooks.editors.prune import PRUNE
from edit_hooks.request import EditRequest

QUICK = {"num_steps": 1, "lr": 0.01}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(origins, "_reported", set())
    caplog.set_level(logging.INFO, "lm_eval.edited_hf")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("editor ")]


def test_a_run_on_an_unknown_model_has_one_line_with_the_command_that_tunes(tiny_path, caplog) -> None:
    path = str(tiny_path("llama"))
    lm = build(path, editor="ultraedit", editor_args={})
    results = run(lm, BAKE[:1], limit=1, settings={"generate": False})
    (line,) = lines(caplog)
    assert line.startswith(
        "editor ultraedit: no settings are shipped for this llama model of 3 blocks, so the editor's"
    )
    assert "blocks [1, 2] by depth" in line and "updates 0.006 times the norm" in line
    assert line.endswith(
        f"lm-edit tune --pretrained {path} --editor ultraedit --edits bake --last --out tuned.yaml; then "
        "editor_args=tuned.yaml"
    )
    record = results["config"]["edited_hf"]["settings_origin"]
    assert (record["shipped"], record["given"], record["layers"]) == ([], [], "by depth") and len(
        record["guesses"]
    ) == 1


def test_the_command_that_tunes_loads_the_same_fine_tuned_model(tiny_path, tiny_model, tmp_path, caplog) -> None:
    """It named the model below the adapter: the search would have been about another one."""
    path, adapter = str(tiny_path("llama")), str(export_peft(random_delta(tiny_model("llama")), tmp_path / "adapter"))
    build(path, editor="ultraedit", editor_args={}, peft=adapter, add_bos_token=False)
    (line,) = lines(caplog)
    command = shlex.split(line.partition("better ones: ")[2].partition(";")[0])
    assert command[2:6] == ["--pretrained", path, "--editor", "ultraedit"]
    assert command[command.index("--model-args") + 1] == f"peft={adapter},add_bos_token=False"


def test_a_tuned_file_is_named_and_is_no_guess(tiny_path, tmp_path, caplog) -> None:
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text("{layers: [1], lr: 0.5}", encoding="utf-8")
    lm = build(str(tiny_path("llama")), editor="ft_m", editor_args=str(tuned))
    (line,) = lines(caplog)
    assert f"layers, lr from {tuned}" in line and "blocks [1]" in line and "lm-edit tune" not in line
    assert [record.levelno for record in caplog.records if record.getMessage() == line] == [logging.INFO]
    assert lm._origin.to_json()["settings_file"] == str(tuned)


def test_shipped_settings_are_named_by_their_file(caplog) -> None:
    model = model_like(MODELS["gpt2-xl"])
    origin = load_editor("r_rome", {"lr": 0.3}).settings_origin(model)
    text = "editor r_rome: lr as given; settings of r_rome/gpt2-xl.yaml, which match the model's shape; blocks [17]."
    assert str(origin) == text
    assert origin.to_json()["layers"] == "shipped" and not origin.is_guess


def test_both_files_of_a_post_processing_editor_are_named() -> None:
    origin = load_editor("rect", {"base_settings": {"lr": 0.3}}).settings_origin(model_like(MODELS["gpt2-xl"]))
    assert (origin.editor, origin.base, origin.given) == ("rect", "memit", ("lr",))
    assert origin.shipped == ("memit/gpt2-xl.yaml",)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-7b"])
def test_blocks_named_by_modules_are_no_guess(name: str) -> None:
    """The files of these models set `modules`, not `layers`, and were reported as guesses by depth."""
    origin = load_editor("ultraedit").settings_origin(model_like(MODELS[name]))
    assert not origin.is_guess and origin.to_json()["layers"] == "shipped"
    assert "by depth" not in str(origin) and "lm-edit tune" not in str(origin)
    without = load_editor("ultraedit", {"modules": None}).settings_origin(model_like(MODELS[name]))
    assert without.is_guess and without.to_json()["layers"] == "by depth"


@pytest.mark.parametrize("settings", [{"layers": [1]}, {"modules": {"up": [1]}}])
def test_blocks_are_given_by_either_setting(settings: dict[str, Any]) -> None:
    model = build_model("llama")
    origin = load_editor("ultraedit", {**settings, "lr": 1e-3}).settings_origin(model)
    assert not origin.is_guess and origin.layers == (1,) and origin.to_json()["layers"] == "given"
    base = load_editor("rect", {"base": "ultraedit", "base_settings": {**settings, "lr": 1e-3}})
    of_base = {**origin.to_json(), "given": ["base", *origin.given], "tune_editor": "rect"}
    assert base.settings_origin(model).to_json() == of_base


def test_a_trained_hyper_network_determines_its_blocks(tmp_path: Path) -> None:
    """Its blocks were reported as chosen by depth, though it edits no others."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    trainer(model, tokenizer, tmp_path / "run", num_steps=1, validate_every=1, rank=2).run()
    origin = load_editor("mend", {"artifact": str(tmp_path / "run")}).settings_origin(model)
    assert not origin.is_guess and origin.layers == (EDIT_LAYER,) and origin.to_json()["layers"] == "given"
    untrained = load_editor("mend", {"artifact": "identity"}).settings_origin(model)
    assert untrained.is_guess and untrained.to_json()["layers"] == "by depth"


def test_use_without_a_harness_has_the_line_once(caplog) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    requests = [EditRequest(**REQUESTS[0])]
    for _ in range(2):
        load_editor("ft_m", QUICK).edit(model, tokenizer, requests)
    load_editor("prune", {"base": "r_rome", "base_settings": {"num_steps": 1, "context_templates": ["{}"]}}).edit(
        model, tokenizer, requests
    )
    said = lines(caplog)
    assert sum(line.startswith("editor ft_m: num_steps, lr as given; no settings") for line in said) == 1
    assert sum("no settings are shipped" in line for line in said) == 2  # one of prune, none of its base


class OwnEditor(FTM):
    """An editor of another package."""

    name = "own"


class OwnWrapper(PRUNE):
    """A wrapper of another package, without a name of its own."""


def test_the_hint_names_an_editor_that_the_command_knows() -> None:
    """From Python, where no option spells the editor: its name is not what `--editor` takes."""
    model = build_model("llama")
    for editor in (OwnEditor(), OwnWrapper({"base": "ft_m"})):
        command = shlex.split(editor.settings_origin(model).tune_command)
        spelled = command[command.index("--editor") + 1]
        assert spelled == f"{__name__}:{type(editor).__name__}" and isinstance(load_editor(spelled), type(editor))
    assert "--editor ft_m " in load_editor("ft_m").settings_origin(model).tune_command


def test_the_class_of_a_notebook_has_no_command() -> None:
    class Local(FTM):
        pass

    class OfMain(FTM):
        __module__ = "__main__"

    for editor in (Local(), OfMain()):
        hint = str(editor.settings_origin(build_model("llama")))
        assert "once the class is in a module: lm-edit tune --editor <module>:<class>." in hint
        assert f"--editor {editor.name} " not in hint


def test_contexts_alone_have_no_line(tiny_path, caplog) -> None:
    lm = build(str(tiny_path("llama")), editor="ice", editor_args={})
    assert lines(caplog) == [] and lm._origin is None
    build(str(tiny_path("llama")), editor="ft_m", editor_args=QUICK, icl=True)
    assert [line.split(":")[0] for line in lines(caplog)] == ["editor ft_m"]
