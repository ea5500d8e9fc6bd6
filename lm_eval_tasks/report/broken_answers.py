"""Documents of lm-eval's own tasks that a broken model did not answer: unscored, with the reason, and counted.

The scorers of these tasks take any number and any text for an answer: of log-likelihoods that are NaN, the first is the
largest. So a document with such an answer does not reach its scorer. In its sample the metrics are ``None``, and
``unscored_reason`` has the reason. The task gets the columns of editing tasks: ``unscored``, ``unscored_reason``, and
the counts ``<metric>_n`` and ``<metric>_failed``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from edit_hooks.answers import FailedAnswer, is_broken
from lm_eval_tasks.common.asking.answers import NOT_FINITE
from lm_eval_tasks.common.scoring.columns import SUMMARIES
from lm_eval_tasks.report.run_facts import ordinary_tasks

NO_ANSWER = FailedAnswer(NOT_FINITE)


class GatheringModel(Protocol):
    """The communication of lm-eval's model classes."""

    rank: int
    world_size: int

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks at rank ``dst``."""


def without_broken_answers(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """lm-eval's ``evaluate`` for our model class, with documents that have no answer unscored."""

    @functools.wraps(evaluate)
    def evaluate_answered(*args: Any, **kwargs: Any) -> Any:
        options = inspect.signature(evaluate).bind(*args, **kwargs).arguments
        lm, loaded = options["lm"], options["task_dict"].get("tasks") or {}
        tasks = {name: loaded[name] for name in ordinary_tasks(loaded)}
        with contextlib.ExitStack() as stack:
            broken = {name: stack.enter_context(_broken_unscored(task)) for name, task in tasks.items()}
            results = evaluate(*args, **kwargs)
        counts = _total(lm, {name: len(documents) for name, documents in broken.items()})
        if results is not None:
            for name in (name for name in tasks if counts.get(name)):
                _add_counts(name, tasks[name], counts[name], results)
        return results

    return evaluate_answered


@contextlib.contextmanager
def _broken_unscored(task: Any) -> Iterator[set[int]]:
    """Scope in which a task's documents without an answer are not scored; yields their numbers."""
    apply_filters, process_results = task.apply_filters, task.process_results
    broken: set[int] = set()

    def apply_and_mark() -> Any:
        filtered = apply_filters()
        for instance in task.instances:
            if any(map(is_broken, instance.resps)):
                broken.add(instance.doc_id)
                instance.filtered_resps = dict.fromkeys(instance.filtered_resps, NO_ANSWER)
        return filtered

    def score(doc: Any, results: Any) -> Any:
        return {} if any(result is NO_ANSWER for result in results) else process_results(doc, results)

    task.apply_filters, task.process_results = apply_and_mark, score  # shadow the methods
    try:
        yield broken
    finally:
        for method in ("apply_filters", "process_results"):
            vars(task).pop(method, None)


def is_answered(sample: Mapping[str, Any], metric: str) -> bool:
    """Whether a document of an ordinary task reached the scorer of a metric."""
    return (sample.get("unscored_reason") or {}).get(metric) != NOT_FINITE


def _total(lm: GatheringModel, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts of all processes at the first one; of each of them elsewhere."""
    gathered = (lm.gather_object([counts]) if lm.world_size > 1 else None) or [[counts]]
    return {name: sum(of_rank[name] for (of_rank,) in gathered) for name in counts}


def _add_counts(name: str, task: Any, count: int, results: dict[str, Any]) -> None:
    """Add the counts of a task to its results, and metrics without a value to the samples of its broken documents."""
    row, asked = results["results"][name], results["n-samples"][name]
    scored = asked["effective"]
    asked["effective"] = scored + count
    pipelines = dict.fromkeys(key.partition(",")[2] for key in row if "," in key)
    for instance in task.instances[:1]:
        pipelines |= dict.fromkeys(instance.filtered_resps)
    declared = [str(metric["metric"]) for metric in task.config.metric_list or ()]
    for pipeline in pipelines:
        values = {key.removesuffix(f",{pipeline}"): row[key] for key in row if key.endswith(f",{pipeline}")}
        metrics = [
            metric for metric in values if not metric.endswith("_stderr") and metric not in SUMMARIES
        ] or declared
        for metric in metrics:
            row[f"{metric},{pipeline}"] = values.get(metric)
            row |= {f"{metric}_n,{pipeline}": scored, f"{metric}_failed,{pipeline}": count}
        row[f"unscored,{pipeline}"] = count
        row[f"unscored_reason,{pipeline}"] = json.dumps({NOT_FINITE: count})
        for sample in results.get("samples", {}).get(name, ()):
            if sample["filter"] == pipeline and any(
                isinstance(part, FailedAnswer) for part in sample["filtered_resps"]
            ):
                sample["filtered_resps"] = list(map(str, sample["filtered_resps"]))
                sample |= {"metrics": metrics, **dict.fromkeys(metrics)}
                sample["unscored_reason"] = dict.fromkeys(metrics, NOT_FINITE)
