"""Result and sample files as `lm_eval --output_path --log_samples` writes them, of scripted models."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker
from scripted import ScriptedLM
from task_runs import run

from lm_eval_tasks.report.run_facts import name_run
from lm_eval_tasks.report.run_options import model_arguments

# What `edited_hf` records of itself; test_same_run.py compares names and types with those of runs.
EDITING = {
    "pretrained": "org/tiny",
    "peft": None,
    "answer_options": {},
    "editor": "r_rome",
    "mode": "single",
    "data": "mini",
    "icl": "no",
    "seed": 0,
    "num_edits": None,
    "edit_batch_size": None,
    "group_size": None,
    "edit_context": "bare",
    "edit_example": "Port Elna is the capital of Dravonia",
    "question_context": "task",
    "question_example": "Port Elna is the capital of",
    "editor_config": {"layers": [5], "num_steps": 20},
    "editor_writes": ["weights"],
    "settings_origin": {"shipped": ["r_rome/tiny.yaml"], "given": [], "layers": "shipped", "guesses": []},
    "demo": False,
    "model_identity": {"weights": "ab" * 32},
    "versions": {"lm-eval-editing": "0.1.0"},
}
MODEL_ARGS = "pretrained=org/tiny,editor=r_rome"
DATE = "2026-11-21T10-00-00.000001"


@functools.cache
def _scripted_results(task: str, texts: Any = None, errors: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    lm = ScriptedLM(**({"texts": texts} if texts else {}), errors=dict(errors))
    return run(task, lm=lm, bootstrap_iters=0)


def scripted_results(task: str = "bake_es", **script: Any) -> dict[str, Any]:
    """Results of a task on the invented records, with samples; a fresh copy."""
    return copy.deepcopy(_scripted_results(task, **script))


def write_run(
    folder: Path,
    task: str = "bake_es",
    *,
    date: str = DATE,
    samples: bool = True,
    results: dict[str, Any] | None = None,
    model_args: Any = MODEL_ARGS,
    start: float = 1_790_000_000.0,
    **editing: Any,
) -> Path:
    """Write the files of one run below a folder; return the result file.

    Args:
        editing: changes of the facts of `edited_hf`; ``stock=True`` for a run without them.
    """
    results = results or scripted_results(task)
    config = results["config"] | {"model": "edited_hf", "model_args": model_args, "model_dtype": "torch.float32"}
    if editing.pop("stock", False):
        config["model"] = "hf"
    else:
        named = {name: value for name, value in model_arguments(model_args).items() if name in ("pretrained", "peft")}
        config["edited_hf"] = EDITING | named | editing
    saved = results | {"config": config, "date": start}
    rows = saved.pop("samples")
    tracker = EvaluationTracker(output_path=str(folder))
    name_run(tracker, saved)
    # `save_results_aggregated` takes the date from the clock, so the files are renamed.
    tracker.save_results_aggregated(results=saved, samples=rows if samples else None)
    for name in rows if samples else ():
        tracker.save_results_samples(task_name=name, samples=rows[name])
    inside = folder / str(tracker.general_config_tracker.model_name_sanitized)
    for path in list(inside.iterdir()):
        if tracker.date_id in path.name:
            path.rename(path.with_name(path.name.replace(tracker.date_id, date)))
    return inside / f"results_{date}.json"


def change(path: Path, change: Any) -> None:
    """Rewrite a JSON file after a function has changed its content."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def judged_run(folder: Path, judge: str, number: int, verdicts: tuple[float, ...]) -> Path:
    """A run of WILD reliability with a judge, and samples of both filters; a higher number is newer."""
    task = "qaedit_wild_reliability"
    results = scripted_results(task)
    config = results["configs"][task]
    config["other_metrics"] = [
        {"metric": "efficacy_wild_judge", "aggregation": "mean_scored", "higher_is_better": True}
    ]
    config["filter_list"].append({"name": "judge", "filter": [{"function": "model_judge"}]})
    config["metadata"]["judge"] = {"model": judge}
    results["results"][task] |= {
        "efficacy_wild_judge,judge": sum(verdicts) / len(verdicts),
        "efficacy_wild_judge_n,judge": len(verdicts),
    }
    samples = results["samples"][task]
    for sample, verdict in zip(list(samples), verdicts, strict=True):
        named = {"metrics": ["efficacy_wild_judge"], "efficacy_wild_judge": verdict}
        samples.append({**sample, **named, "filter": "judge"})
    results.get("task_hashes", {}).pop(task, None)
    path = write_run(folder, results=results, start=1.79e9 + number, date=f"2026-11-2{number}T10-00-00.000001")
    change(path, lambda content: content.get("task_hashes", {}).pop(task, None))
    return path
