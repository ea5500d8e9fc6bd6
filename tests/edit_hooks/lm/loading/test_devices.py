"""The device of a run: recorded as it computed, and part of the keys of stored answers; its text is neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_runs import build, instance
from result_files import write_run

from edit_hooks.answers import LoglikelihoodPair
from edit_hooks.lm.loading.devices import describe_devices
from edit_hooks.lm.stock.unedited import UneditedStock
from edit_hooks.store.store import Store
from lm_edit.results.checking.repository import submit


def test_results_name_the_device_that_computed(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    lm = build(str(tiny_path("gpt2")), mode="none", device="cpu")
    found = lm.get_model_info()["edited_hf"]["device"]
    assert found == {"type": "cpu", "name": None, "count": 1}
    path = write_run(tmp_path / "runs", device=found)
    *_, submitted = (one for one in submit([path], tmp_path / "repository") if one.name.startswith("results_"))
    assert json.loads(submitted.read_text(encoding="utf-8"))["config"]["edited_hf"]["device"] == found


def test_gpus_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    tensors = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda:0")]
    model: Any = SimpleNamespace(parameters=lambda: tensors, buffers=list)
    assert describe_devices(model) == {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "count": 2}


def test_stored_unedited_answers_are_those_of_a_type_of_device(tmp_path: Path) -> None:
    """`cuda:0` is lm-eval's default, and on a machine without a GPU computes on the CPU."""
    store, asked = Store(tmp_path / "store"), list[str]()
    requests = [instance({}, "Marsk is the capital of", " Tolmeria")]

    def ask(option: str | None, computes: str) -> None:
        def compute() -> list[Any]:
            asked.append(computes)
            return [LoglikelihoodPair(-1.0, True, 1)]

        settings = {"dtype": "float32", **({} if option is None else {"device": option})}
        UneditedStock(settings).answers(requests, compute, store, {"weights": "ab"}, computes)

    ask("cuda:0", "cpu")
    ask("cpu", "cpu")
    ask(None, "cpu")
    assert asked == ["cpu"]
    ask("cuda:0", "cuda")
    ask("cuda:1", "cuda")
    assert asked == ["cpu", "cuda"]
