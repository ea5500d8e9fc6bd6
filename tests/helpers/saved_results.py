"""Run evaluations, read the files of ``--output_path --log_samples``, and compare runs number by number."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string
from lm_runs import SHORT
from task_managers import FOLDER, task_manager

import lm_eval_editing_autoload  # noqa: F401  # makes the model known

# The only values that may differ between two equal runs on one machine.
TIMES = {"seconds", "seconds_per_edit"}
# Answers as text, rounded for people; `resps` has the exact answers.
RENDERED = {"filtered_resps"}


def evaluate_here(
    folder: Path,
    model_args: str | dict[str, Any],
    tasks: list[str],
    data: Path | str,
    more_tasks: Path | None = None,
    **options: Any,
) -> None:
    """`lm_eval --model edited_hf ...` in this process, written to ``folder`` as the command writes it.

    Args:
        more_tasks: a folder with tasks besides ours.
    """
    given = simple_parse_args_string(model_args) if isinstance(model_args, str) else model_args
    metadata = {"data": str(data), **given}
    if more_tasks is None:
        manager = task_manager(metadata)
    else:
        manager = TaskManager(include_path=[FOLDER, more_tasks], include_defaults=False, metadata=metadata)
    tracker = EvaluationTracker(output_path=str(folder))
    results = lm_eval.simple_evaluate(
        model="edited_hf",
        model_args=model_args,
        tasks=tasks,
        device="cpu",
        task_manager=manager,
        evaluation_tracker=tracker,
        **{"gen_kwargs": dict(SHORT), "bootstrap_iters": 0, **options},
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])


def save_samples(results: dict[str, Any], folder: Path, task: str) -> str:
    """Write a task's samples as `lm_eval --log_samples --output_path` does; returns the file's path."""
    tracker = EvaluationTracker(output_path=str(folder))
    tracker.general_config_tracker.model_name_sanitized = "scripted"
    tracker.date_id = "2026-11-21T10-00-00.123456"
    tracker.save_results_samples(task_name=task, samples=results["samples"][task])
    (path,) = folder.rglob("samples_*.jsonl")
    return str(path)


def read_results(folder: Path) -> dict[str, Any]:
    """``results`` and ``samples`` by task, with every answer as a structure."""
    (aggregated,) = folder.glob("*/results_*.json")
    results = json.loads(aggregated.read_text(encoding="utf-8"))
    samples = {}
    for path in sorted(folder.glob("*/samples_*.jsonl")):
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        samples[task] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {
        "results": {task: readable(metrics) for task, metrics in results["results"].items()},
        "counts": results["n-samples"],
        "samples": {task: [readable(sample) for sample in rows] for task, rows in samples.items()},
        "config": results["config"],
    }


def readable(value: Any) -> Any:
    """The value with JSON texts (answers, summaries) parsed, without times and rendered answers."""
    if isinstance(value, dict):
        return {key: readable(entry) for key, entry in value.items() if key not in TIMES | RENDERED}
    if isinstance(value, (list, tuple)):
        return [readable(entry) for entry in value]
    if isinstance(value, str) and value[:1] in ("{", "[") and value[-1:] in ("}", "]"):
        with contextlib.suppress(ValueError):
            return readable(json.loads(value))
    return value


def differences(left: Any, right: Any, tolerance: float = 0.0, where: str = "") -> list[str]:
    """Paths at which two structures differ; numbers by more than ``tolerance`` (relative or absolute)."""
    if isinstance(left, dict) and isinstance(right, dict):
        paths = [f"{where}: keys {sorted(left.keys() ^ right.keys())}"] if list(left) != list(right) else []
        for key in left.keys() & right.keys():
            paths += differences(left[key], right[key], tolerance, f"{where}/{key}")
        return paths
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [text for i, (one, two) in pairs for text in differences(one, two, tolerance, f"{where}/{i}")]
    if tolerance and isinstance(left, str) and isinstance(right, str) and "." in left:  # lm-eval saves answers as texts
        with contextlib.suppress(ValueError):
            left, right = float(left), float(right)
    if isinstance(left, float) and isinstance(right, float) and tolerance:
        return [] if math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance) else [f"{where}: {left} {right}"]
    return [] if left == right else [f"{where}: {str(left)[:80]!r} {str(right)[:80]!r}"]
