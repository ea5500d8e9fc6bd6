"""`lm-edit check-model`, and rows from outside in a run."""

from __future__ import annotations

import dataclasses
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from command_line import write_requests
from lm_runs import FAST, build, run
from pytest import CaptureFixture, MonkeyPatch

from edit_hooks import EditingError
from edit_hooks.contract.tiny_models import build_model, save_tiny
from edit_hooks.modeling import architectures
from edit_hooks.modeling.architectures import architecture_of
from lm_edit.cli.main import main

EDITOR_ARGS = {**FAST, "num_steps": 2, "second_moments": None}


def check(path: Path, *words: str) -> int:
    return main(["check-model", str(path), "--device", "cpu", *words])


@pytest.mark.parametrize(
    ("model_type", "code", "lines"),
    [
        ("granite", 0, ["offered: fast engine", "blocks whose MLP can be edited: 0 to 2", "divide residuals by 0.22"]),
        ("mixtral", 0, ["offered: attention maps only", "the MLP is a mixture of experts", "family=attention_output"]),
        ("mamba", 1, ["offered: context editors only", "structure: no decoder blocks"]),
    ],
)
def test_checks_offer_and_reasons_are_printed(
    model_type: str, code: int, lines: list[str], tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    assert check(save_tiny(tmp_path, model_type)) == code
    printed = capsys.readouterr().out
    assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", "MambaForCausalLM fails the self-check that every model passes"),
        ("mixtral", "its MLP is a mixture of experts"),
    ],
)
@pytest.mark.parametrize("verb", ["trace", "stats"])
def test_traces_and_statistics_need_what_edits_need(
    verb: str, model_type: str, message: str, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    """A trace of a model that fails the self-check would be numbers of modules that are not those of an MLP."""
    model = ["--pretrained", str(save_tiny(tmp_path, model_type)), "--device", "cpu"]
    facts = ["--edits", str(write_requests(tmp_path / "facts.jsonl")), "--answer", "predicted", "--store", "off"]
    words = facts if verb == "trace" else ["--layers", "1", "--tokens", "64"]
    assert main([verb, *model, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_is_named_once(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert check(tmp_path, "--pretrained", "another") == 2
    assert "give the model once" in capsys.readouterr().err


@pytest.fixture
def row_module(monkeypatch: MonkeyPatch) -> Any:
    """A module of another package with a row for Mamba's relative that the structure does not show."""
    monkeypatch.setattr(architectures, "_given", {})
    module = types.ModuleType("their_rows")
    row = architecture_of(build_model("smollm3"))
    monkeypatch.setattr(module, "ROW", dataclasses.replace(row, post_norm=None), raising=False)
    monkeypatch.setattr(module, "WRONG", dataclasses.replace(row, rewrite="model.layers.{}.ff.out"), raising=False)
    monkeypatch.setitem(sys.modules, "their_rows", module)
    yield module
    architectures._found.clear()


def test_a_row_is_used_by_option_and_by_entry_point(row_module: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    path = str(save_tiny(tmp_path, "smollm3"))
    lm = build(path, editor="rome", editor_args=EDITOR_ARGS, family="their_rows:ROW")
    assert architecture_of(lm.outline) is row_module.ROW
    results = run(lm, ["bake_es"], limit=1)
    assert results["config"]["model_args"] or results["results"]["bake_es"]
    monkeypatch.setattr(architectures, "_given", {})
    entry = EntryPoint("smollm3", "their_rows:ROW", architectures.ENTRY_POINTS)
    monkeypatch.setattr(architectures, "_registered_families", lambda: {"smollm3": entry})
    assert architecture_of(build_model("smollm3")) is row_module.ROW


def test_a_row_by_option_is_that_of_its_run_alone(row_module: Any, tmp_path: Path) -> None:
    """Also of runs that are alive at the same time, and of one that gets the model of another."""
    path = str(save_tiny(tmp_path, "smollm3"))
    chosen, plain = build(path, mode="none", family="their_rows:ROW"), build(path, mode="none")
    assert architecture_of(chosen.outline) is row_module.ROW
    assert architecture_of(plain.outline) is not row_module.ROW
    chosen.load()
    plain.load()
    assert architecture_of(chosen.model) is row_module.ROW
    assert architecture_of(plain.model) is not row_module.ROW
    view = build(chosen.model, tokenizer=chosen.tokenizer, mode="none")
    assert architecture_of(view.model) is not row_module.ROW


@pytest.mark.parametrize(
    ("family", "message"),
    [("their_rows:MISSING", "has no 'MISSING'"), ("their_rows", "package.module"), ("sys:path", "is a list")],
)
def test_a_row_that_is_none_is_refused(family: str, message: str, row_module: Any, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=message):
        build(str(save_tiny(tmp_path, "smollm3")), editor="rome", editor_args=EDITOR_ARGS, family=family)


def test_names_that_the_model_lacks_are_refused_before_loading(row_module: Any, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"names no module 'model.layers.0.ff.out'"):
        build(str(save_tiny(tmp_path, "smollm3")), editor="rome", editor_args=EDITOR_ARGS, family="their_rows:WRONG")
