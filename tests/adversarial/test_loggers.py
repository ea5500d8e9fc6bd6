"""lm-eval's own writers of samples on every task: Weights & Biases, Trackio, `--log_samples`, the hub."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import serve
from lm_eval.loggers import EvaluationTracker, WandbLogger
from scripted import ScriptedLM, StreamLM
from task_runs import TASKS, build, run

JUDGED = [task for task in TASKS if any(m.get("from") == "judge" for m in build(task).config.metric_list)]


class Recorder:
    """Stands in for a run of Weights & Biases: keeps what is logged."""

    def __init__(self) -> None:
        self.config, self.summary = dict[str, Any](), dict[str, Any]()
        self.logged = dict[str, Any]()
        self.artifacts = dict[str, str]()

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged |= values

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts |= artifact.files


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.files = dict[str, str]()

    @contextlib.contextmanager
    def new_file(self, name: str, mode: str, encoding: str) -> Iterator[io.StringIO]:
        file = io.StringIO()
        yield file
        self.files[name] = file.getvalue()


class Table:
    def __init__(self, columns: list[str]) -> None:
        self.columns, self.rows = columns, list[Any]()

    def add_data(self, *row: Any) -> None:
        assert len(row) == len(self.columns)
        self.rows.append(row)


class Config(dict):
    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        super().update(values)


@pytest.fixture
def wandb_run(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    recorder.config = Config()
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    vars(module).update(__version__="0.20.0", run=recorder, Table=Table, Artifact=Artifact)
    printer = types.ModuleType("wandb.sdk.lib.printer")
    vars(printer).update(new_printer=lambda: None)
    for name, entry in {"wandb": module, "wandb.sdk.lib.printer": printer}.items():
        monkeypatch.setitem(sys.modules, name, entry)
    for name in ("wandb.sdk", "wandb.sdk.lib"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return recorder


def log_to_wandb(results: dict[str, Any]) -> None:
    """What the command line does with ``--wandb_args``."""
    results = dict(results)
    samples = results.pop("samples")
    logger = WandbLogger({})
    logger.post_init(results)
    logger.log_eval_result()
    logger.log_eval_samples(samples)


def check_logged(recorder: Recorder, task: str, results: dict[str, Any]) -> None:
    samples = results["samples"][task]
    table = recorder.logged[f"{task}_eval_results"]
    assert list(table["id"]) == [sample["doc_id"] for sample in samples]
    for metric in results["configs"][task]["metric_list"]:
        name = metric["metric"]
        assert [None if value != value else value for value in table[name]] == [sample[name] for sample in samples]
    assert len(json.loads(recorder.artifacts[f"{task}_eval_samples.json"])) == len(samples)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_samples_of_every_task_are_logged(task: str, wandb_run: Recorder) -> None:
    results = run(task, ScriptedLM(errors={"1": "no such layer"}))
    log_to_wandb(results)
    check_logged(wandb_run, task, results)
    declared = {metric["metric"] for metric in results["configs"][task]["metric_list"]}
    assert declared and all(f"{name},none" in results["results"][task] for name in declared)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", JUDGED)
@pytest.mark.parametrize("stream", [False, True], ids=["single", "sequential"])
def test_samples_of_judged_tasks_are_logged(task: str, stream: bool, wandb_run: Recorder, tmp_path: Path) -> None:
    lm = StreamLM({"0": "100", "1": ".11"}, {1: 0}) if stream else ScriptedLM()
    settings = {"mode": "sequential", "checkpoints": "1"} if stream else {}
    with serve() as server:
        judge = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path)}
        results = run(task, lm, {**settings, "judge": judge})
    assert {sample["filter"] for sample in results["samples"][task]} == {"none", "judge"}
    log_to_wandb(results)
    check_logged(wandb_run, task, results)
    by_pipeline = results["configs"][task]["metrics_by_filter"]
    for name, metrics in by_pipeline.items():
        assert metrics and all(f"{metric},{name}" in results["results"][task] for metric in metrics)


def test_samples_of_predictions_only_are_logged(wandb_run: Recorder) -> None:
    results = run(JUDGED[0], predict_only=True)
    log_to_wandb(results)
    check_logged(wandb_run, JUDGED[0], results)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_samples_of_every_task_are_saved(task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = run(task, ScriptedLM(errors={"1": "no such layer"}))
    samples = results.pop("samples")
    tracker = EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_name_sanitized = "model"
    num_samples = len(samples[task])
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name=task, samples=samples[task])
    assert "Could not save" not in caplog.text
    (saved,) = tmp_path.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == num_samples and list(tmp_path.rglob("results_*.json"))
