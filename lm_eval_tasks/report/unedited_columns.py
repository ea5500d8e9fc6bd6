"""Columns of the unedited model for lm-eval's own tasks: ``acc@unedited`` and ``acc@difference``.

With ``compare_unedited=true`` the ordinary tasks of a run are evaluated twice on the same requests: as they are, and
with all edits off. Documents of editing tasks bring their own comparison with the unedited model and are asked once.

``@difference`` is edited minus unedited. Both models answer the same documents, so its standard error is that of the
paired differences. For a mean that is the sample standard deviation of the differences per document over sqrt(n). For
any other aggregation (F1, MCC, perplexity) it is the jackknife: the aggregation of both models without document i, for
every i. The jackknife of a mean is the former. For a group, lm-eval's formula combines the errors of its tasks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lm_eval.api.group import Group
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger
from lm_eval_tasks.common.scoring.aggregation import NOT_AVAILABLE, mean_scored
from lm_eval_tasks.common.scoring.columns import read_columns
from lm_eval_tasks.report.broken_answers import is_answered

log = get_logger("lm_eval.edited_hf")

UNEDITED, DIFFERENCE = "@unedited", "@difference"
MAX_GROUPS = 200  # of documents that the jackknife leaves out together, where it has to aggregate again

Aggregation = Callable[[Sequence[Any]], Any]
Metrics = dict[str, Any]


class ComparingModel(Protocol):
    """What ``edited_hf`` offers besides lm-eval's interface."""

    rank: int
    world_size: int

    def unedited(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which ordinary requests are asked of the unedited model."""


def evaluate_both(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """lm-eval's ``evaluate`` with the columns of the unedited model.

    Args:
        evaluate: lm-eval's function.
        args, kwargs: its arguments.

    Returns:
        Its results. ``unedited_comparison`` in them lists the compared tasks, and for every task or metric that could
        not be compared the reason.

    Raises:
        EditingError: for tasks that are not loaded with ``TaskManager.load``.
    """
    options = inspect.signature(evaluate).bind(*args, **kwargs).arguments
    lm, loaded = options.pop("lm"), options.pop("task_dict")
    if "tasks" not in loaded:
        raise EditingError("compare_unedited=True needs tasks that TaskManager.load has loaded; use simple_evaluate.")
    keeps_samples = options.pop("log_samples", True)
    results = evaluate(lm=lm, task_dict=loaded, log_samples=True, **options)
    ordinary = {name: task for name, task in loaded["tasks"].items() if _is_ordinary(task)}
    not_compared: dict[str, str] = {}
    unedited = _evaluate_unedited(evaluate, lm, ordinary, {**options, "write_out": False}, not_compared)
    if results is None:  # not the rank with the results
        return None
    names = [name for name in ordinary if name in unedited.get("results", {})]
    differences = {name: _add_task_columns(name, ordinary[name], results, unedited, not_compared) for name in names}
    for name, group in loaded.get("groups", {}).items():
        _add_group_columns(name, group, results, unedited, differences)
    results["unedited_comparison"] = {"tasks": names, "not_compared": not_compared}
    for name, reason in not_compared.items():
        log.warning("%s is not compared with the unedited model: %s", name, reason)
    if not keeps_samples:
        del results["samples"]
    return results


def _is_ordinary(task: Task) -> bool:
    """Whether no document of a task brings edits of its own."""
    return not any(isinstance(one.doc, Mapping) and "edit_requests" in one.doc for one in task.instances)


def _evaluate_unedited(
    evaluate: Callable[..., Any],
    lm: ComparingModel,
    tasks: Mapping[str, Task],
    options: Mapping[str, Any],
    not_compared: dict[str, str],
) -> Mapping[str, Any]:
    """Results of the unedited model; a task that fails is named, and the others are evaluated without it."""
    if not tasks:
        return {}
    try:
        with _same_requests(tasks), lm.unedited():
            return evaluate(lm=lm, task_dict={"tasks": tasks, "groups": {}}, log_samples=True, **options) or {}
    except Exception as error:  # of a scorer that the edited answers did not reach: hours of answers are there already
        if lm.world_size > 1:
            raise
        if len(tasks) == 1:
            not_compared[next(iter(tasks))] = first_line(error)
            return {}
    parts = [_evaluate_unedited(evaluate, lm, {name: task}, options, not_compared) for name, task in tasks.items()]
    return {
        column: {name: value for part in parts for name, value in part.get(column, {}).items()}
        for column in ("results", "samples")
    }


@contextlib.contextmanager
def _same_requests(tasks: Mapping[str, Task]) -> Iterator[None]:
    """Scope in which tasks keep the requests they have, without the answers.

    Built again, few-shot prompts could differ: their random generators have moved on.
    """
    for task in tasks.values():
        task.build_all_requests = lambda **_: None  # shadows the method
        for instance in task.instances:
            instance.resps, instance.filtered_resps = [], {}  # the samples of the first pass keep the old objects
    try:
        yield
    finally:
        for task in tasks.values():
            vars(task).pop("build_all_requests", None)


def _add_task_columns(
    name: str, task: Task, results: Mapping[str, Any], unedited: Mapping[str, Any], not_compared: dict[str, str]
) -> Metrics:
    """Add the columns of a task; return its differences under the names of the metrics themselves, for its groups."""
    columns, other = results["results"][name], unedited["results"][name]
    samples = _by_document(results["samples"][name], unedited["samples"][name])
    added: Metrics = {}
    differences: Metrics = {"sample_len": columns["sample_len"]}
    for column in read_columns({key: columns[key] for key in columns if "," in key}, task.aggregation()):
        metric, pipeline, value = column.name, column.filter, column.value
        key = f"{metric},{pipeline}"
        if isinstance(value, str):
            continue
        if not _is_number(value) or not _is_number(other.get(key)):
            not_compared[f"{name}: {metric}"] = "it has no value on " + (
                "the unedited model." if _is_number(value) else "the edited model."
            )
            continue
        asked = [pair for pair in samples.get(pipeline, ()) if all(metric in sample for sample in pair)]
        answered = [pair for pair in asked if all(is_answered(sample, metric) for sample in pair)]
        if asked and not answered:
            not_compared[f"{name}: {metric}"] = "no document has an answer of both models."
            continue
        pairs = [(edited[metric], plain[metric]) for edited, plain in answered]
        aggregation = task.aggregation().get(metric, mean)
        difference = float(value) - float(other[key])
        if len(answered) < len(asked):
            difference = float(aggregation([one for one, _ in pairs])) - float(aggregation([one for _, one in pairs]))
            added[f"{metric}{DIFFERENCE}_n,{pipeline}"] = len(pairs)
        stderr_key = f"{metric}_stderr,{pipeline}"
        differences |= {key: difference, stderr_key: paired_stderr(pairs, aggregation)}
        for count in ("n", "failed"):
            if (number := other.get(f"{metric}_{count},{pipeline}")) is not None:
                added[f"{metric}{UNEDITED}_{count},{pipeline}"] = number
        added |= {
            f"{metric}{UNEDITED},{pipeline}": other[key],
            f"{metric}{UNEDITED}_stderr,{pipeline}": other.get(stderr_key, NOT_AVAILABLE),
            f"{metric}{DIFFERENCE},{pipeline}": difference,
            f"{metric}{DIFFERENCE}_stderr,{pipeline}": differences[stderr_key],
        }
        _declare(results, name, metric)
    columns.update(added)
    return differences


def _by_document(edited: Sequence[Metrics], unedited: Sequence[Metrics]) -> dict[str, list[tuple[Metrics, Metrics]]]:
    """Pairs of samples of the same document by filter pipeline; the unedited answers are added to the edited sample."""
    plain = {(sample["filter"], sample["doc_id"]): sample for sample in unedited}
    pairs: dict[str, list[tuple[Metrics, Metrics]]] = {}
    for sample in edited:
        if other := plain.get((sample["filter"], sample["doc_id"])):
            pairs.setdefault(sample["filter"], []).append((dict(sample), other))
            kept = ("prompt_hash", "resps", "filtered_resps", *other["metrics"])
            sample["unedited"] = {name: other[name] for name in kept}
    return pairs


def _add_group_columns(
    name: str,
    group: Group,
    results: Mapping[str, Any],
    unedited: Mapping[str, Any],
    differences: Mapping[str, Metrics],
) -> None:
    """Add the columns of a group that aggregates, if all of its tasks are compared."""
    leaves = [task.task_name for task in group.get_all_tasks()]
    if not group.has_aggregation or not all(leaf in differences for leaf in leaves):
        return
    columns = results["results"][name]
    plain, difference = group.aggregate(unedited["results"]), group.aggregate(differences)
    added: Metrics = {}
    for key, value in plain.items():
        metric, comma, pipeline = key.partition(",")
        stderr_key = f"{metric}_stderr,{pipeline}"
        if not comma or metric.endswith("_stderr") or key not in columns or key not in difference:
            continue
        added |= {
            f"{metric}{UNEDITED},{pipeline}": value,
            f"{metric}{UNEDITED}_stderr,{pipeline}": plain[stderr_key],
            f"{metric}{DIFFERENCE},{pipeline}": float(columns[key]) - float(value),
            f"{metric}{DIFFERENCE}_stderr,{pipeline}": difference[stderr_key],
        }
        _declare(results, name, metric)
    for table in ("results", "groups"):
        results.get(table, {}).get(name, {}).update(added)


def _declare(results: Mapping[str, Any], name: str, metric: str) -> None:
    """Give the difference its metric's direction, which the table shows as an arrow; no editor moves the other one."""
    directions = results["higher_is_better"].setdefault(name, {})
    for ending in (UNEDITED, DIFFERENCE):
        directions[f"{metric}{ending}"] = directions.get(metric) if ending == DIFFERENCE else None


def paired_stderr(pairs: Sequence[tuple[Any, Any]], aggregation: Aggregation) -> float | str:
    """Standard error of the difference of one aggregation over the same documents of two models.

    Args:
        pairs: per document the values of the edited and the unedited model; ``None`` is unscored.
        aggregation: all values of a model -> number.

    Returns:
        "N/A" below two documents, and where the aggregation has no value without some of them.
    """
    if aggregation in (mean, mean_scored):
        numbers = [(one, other) for one, other in pairs if one is not None and other is not None]
        return _stderr_of_mean([float(one) - float(other) for one, other in numbers])
    num_groups = min(len(pairs), MAX_GROUPS)
    if num_groups < 2:
        return NOT_AVAILABLE
    estimates = []
    for group in range(num_groups):
        kept = [pair for index, pair in enumerate(pairs) if index % num_groups != group]
        one, other = (aggregation([pair[side] for pair in kept]) for side in (0, 1))
        if not _is_number(one) or not _is_number(other):
            return NOT_AVAILABLE
        estimates.append(float(one) - float(other))
    center = math.fsum(estimates) / num_groups
    squares = math.fsum((estimate - center) ** 2 for estimate in estimates)
    return math.sqrt((num_groups - 1) / num_groups * squares)


def _stderr_of_mean(values: Sequence[float]) -> float | str:
    if len(values) < 2:
        return NOT_AVAILABLE
    center = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def _is_number(value: object) -> bool:
    """Whether a value is a number, of numpy or Python; NaN is one."""
    return hasattr(value, "__float__")
