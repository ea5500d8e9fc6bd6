"""The speed measurements run, here on tiny models."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from paths import ROOT

from edit_hooks.contract.tiny_models import build_model, build_tokenizer


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "perf"))
    yield importlib.import_module
    for name in ("engine", "editors"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_the_engine_is_measured(load_script: Callable[[str], ModuleType], path: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    engine.check_vocabulary(setup)
    assert engine.seconds_per_edit(setup, path, num_templates=6, edits=1, steps=2) > 0
    assert engine.seconds_per_case(setup, path, edits=1, steps=2) > 0
    assert setup.weight_bytes > 0


def test_the_fast_path_needs_fewer_operations(load_script: Callable[[str], ModuleType]) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, reference = (engine.operations_per_edit(setup, path, 6, edits=1, steps=20) for path in ("fast", "reference"))
    assert fast < reference


@pytest.mark.parametrize("editor", ["ft_m", "lora", "mend"])
def test_gradient_editors_need_fewer_operations(load_script: Callable[[str], ModuleType], editor: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, plain = (engine.operations_per_trained_edit(setup, path, editor, 2, 5) for path in ("fast", "reference"))
    assert fast < plain
    assert engine.seconds_per_trained_edit(setup, "fast", editor, 2, 2) > 0


def test_editors_are_measured_and_printed(
    load_script: Callable[[str], ModuleType],
    tiny_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    editors = load_script("editors")
    list_runs = editors.list_runs

    def list_tiny_runs(editor: str, part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
        model = {"pretrained": str(tiny_path("llama")), "device": "cpu", "data": "mini"}
        return [{**run, "options": {**run["options"], **model}} for run in list_runs(editor, part, args)][:1]

    monkeypatch.setattr(editors, "list_runs", list_tiny_runs)
    manager = TaskManager(include_path=str(ROOT / "lm_eval_tasks"), include_defaults=False, metadata={"data": "mini"})
    evaluate = functools.partial(lm_eval.simple_evaluate, task_manager=manager)  # indexing all tasks takes long
    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    args = argparse.Namespace(out=tmp_path, editors=["ice"], settings=None, limit=1, stream=2, step=2)
    for part in ("single", "seconds"):
        job = editors.Job("ice", part, 0)
        editors.execute(job, args)
        assert json.loads(job.path(tmp_path).read_text())["run"]["options"]["editor"] == "ice"
    editors.print_tables(args)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| `ice`")]
    assert [len(row) for row in rows] == [9, 8]  # the table of single edits also has seconds
    assert float(rows[0][2]) in (0.0, 1.0) and rows[1][2] == "-"
