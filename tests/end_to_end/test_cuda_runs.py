"""On a GPU: runs of lm-eval, with the scores of a CPU, at any batch size, and from the store.

Skipped without one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from editor_settings import settings_of
from lm_runs import BAKE, FAST, SHORT, answers, assert_same_answers, flat
from paths import RECORDS
from task_managers import task_manager

from edit_hooks.base.editor import Editor
from edit_hooks.contract.tiny_models import save_tiny

DEVICE = "cuda"
# CI has no GPU; devices are pretended in tests/contract/test_*_devices.py.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODES: dict[str, dict[str, Any]] = {
    "single": {},
    "sequential": {"mode": "sequential", "edits": "bake", "num_edits": 3, "edit_batch_size": 1, "checkpoints": "2"},
}
EDITORS: dict[str, dict[str, Any]] = {
    "r_rome": FAST,
    "alphaedit": FAST,
    "ft_m": {"num_steps": 4, "lr": 0.01},
    "grace": settings_of("grace"),
}
each_mode = pytest.mark.parametrize("mode", MODES)
each_editor = pytest.mark.parametrize("editor", EDITORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def evaluate(folder: Path, device: str, batch_size: int | str = "auto", **options: Any) -> dict[str, Any]:
    """A run of the first four cases, as ``lm_eval --model edited_hf --device ... --batch_size ...`` starts it."""
    data = {"data": str(RECORDS / "bake_qa.jsonl")}
    arguments = {"pretrained": str(folder), "store": "off", **data, **options}
    return lm_eval.simple_evaluate(
        model="edited_hf",
        model_args=arguments,
        device=device,
        batch_size=batch_size,
        tasks=BAKE,
        task_manager=task_manager(arguments),
        limit=4,
        gen_kwargs=dict(SHORT),
        bootstrap_iters=0,
    )


def scores(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of all tasks, but those of time."""
    return {
        f"{task} {name}": value
        for task, metrics in results["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float | int) and "seconds" not in name
    }


def memory(results: dict[str, Any]) -> list[dict[str, float]]:
    """What the summaries of the edits have of memory, by task."""
    summaries = [json.loads(metrics["edit,none"]) for metrics in results["results"].values()]
    return [{name: value for name, value in summary.items() if name.endswith("_gib")} for summary in summaries]


def options_of(editor: str, mode: str) -> dict[str, Any]:
    return {"editor": editor, "editor_args": dict(EDITORS[editor]), **MODES[mode]}


@each_mode
@each_editor
def test_scores_are_those_of_the_cpu(editor: str, mode: str, folder: Path) -> None:
    found, expected = (
        evaluate(folder, device, dtype="float64", **options_of(editor, mode)) for device in (DEVICE, "cpu")
    )
    # Updates are float32, which moves answers of the tiny model by 1e-5 nats.
    assert_same_answers(answers(found), answers(expected))
    assert scores(found) == pytest.approx(scores(expected), abs=1e-4)
    assert found["config"]["edited_hf"]["device"]["type"] == DEVICE


@each_mode
@pytest.mark.parametrize("editor", ["r_rome", "grace"])
def test_batches_of_any_size(editor: str, mode: str, folder: Path) -> None:
    alone, four, automatic = (
        evaluate(folder, DEVICE, batch_size, dtype="float32", **options_of(editor, mode))
        for batch_size in (1, 4, "auto")
    )
    for together in (four, automatic):
        assert_same_answers(answers(alone), answers(together))
        assert scores(alone) == pytest.approx(scores(together), abs=1e-4)


@each_mode
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("editor", EDITORS)
def test_a_second_run_from_the_store(
    editor: str, dtype: str, mode: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edits and answers are read. With the answers lost, the loaded edits give the same ones, bit for bit.

    The memory of loaded edits is that of their computation.
    """
    options = {**options_of(editor, mode), "dtype": dtype, "store": str(tmp_path)}
    first = evaluate(folder, DEVICE, **options)
    assert all(0 < found["model_memory_gib"] <= found["peak_memory_gib"] for found in memory(first))
    monkeypatch.setattr(Editor, "edit", refused)
    second = evaluate(folder, DEVICE, **options)
    for database in tmp_path.rglob("answers.sqlite*"):
        database.unlink()
    third = evaluate(folder, DEVICE, **options)
    for again in (second, third):
        assert scores(first) == scores(again)
        assert memory(first) == memory(again)
        assert list(map(flat, answers(first))) == list(map(flat, answers(again)))


def refused(*_: Any, **__: Any) -> None:
    raise AssertionError("an edit was made again")
