"""The numbers of a task computed again from the scores in its samples, to find results that do not follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from lm_edit.results.files.runs import ResultFile
from lm_edit.results.files.runs import Samples as SampleRows
from lm_edit.results.files.shape import BROKEN
from lm_edit.results.files.task_facts import TaskFacts
from lm_eval_tasks.common.scoring.aggregation import AGGREGATIONS, STANDARD_ERRORS, mean_scored
from lm_eval_tasks.common.scoring.columns import NOT_AVAILABLE, MetricColumn, is_number, read_columns
from lm_eval_tasks.report.run_facts import is_editing_task

TOLERANCE = 1e-9
COUNT = "total"
UNEDITED = "unedited"
COMPARED = (UNEDITED, "difference")  # stages of compare_unedited
# F1 and MCC of the tasks editglue_*, whose samples have labels instead of scores; their counts are recomputed.
NOT_RECOMPUTED = ("weighted_f1", "matthews")

Samples: TypeAlias = Sequence[Mapping[str, Any]]


def wrong_numbers(file: ResultFile, task: str, read: SampleRows | None = None) -> Iterator[str]:
    """Yield the numbers of a task that do not follow from its samples.

    Those of an editing task are computed again: values by the aggregation that the task declares (but F1 and MCC),
    standard errors, and counts. Of lm-eval's own tasks these are the means of accuracies; their other aggregations
    are not known here.

    Args:
        read: the samples of the task, if they were read.

    Raises:
        EditingError: if the samples cannot be read, or are of another run.
    """
    by_filter: dict[str, list[Mapping[str, Any]]] = {}
    for _, sample in file.samples(task) if read is None else read:
        by_filter.setdefault(str(sample.get("filter", "")), []).append(sample)
    about = TaskFacts(file, task)
    saved = {key: value for key, value in file.tasks[task].items() if "," in key}
    for column in read_columns(saved, about.metrics):
        if isinstance(column.value, str) and column.value != NOT_AVAILABLE:
            continue  # a JSON text: a matrix or a breakdown
        samples = by_filter.get(column.filter, [])
        try:
            yield from _wrong(column, about, samples)
        except BROKEN as error:
            yield f"{task}, {column.name}: cannot be computed from the samples ({type(error).__name__}: {error})."


def _wrong(column: MetricColumn, about: TaskFacts, samples: Samples) -> Iterator[str]:
    is_rate = bool(about.of_metric(column)["is_rate"])
    if is_editing_task(about.config):
        wanted = _of_editing_task(column, about, samples)
    elif is_rate and about.metrics.get(column.metric, {}).get("aggregation", "mean") == "mean":
        wanted = {"": _value(column, samples, mean_scored, paired=True)}
        if "n" in column.companions and column.stage not in COMPARED:  # documents without an answer are not scored
            wanted["n"] = sum(sample[column.name] is not None for sample in samples)
    else:
        return
    if is_rate and not column.stage:
        values = [sample[column.name] for sample in samples if sample[column.name] is not None]
        if odd := [value for value in values if not 0 <= value <= 1]:
            yield f"{about.task}, {column.name}: a sample has {odd[0]}, which is no share."
    saved = {"": column.value, **column.companions}
    noun = "mean of the samples" if is_rate else "value of the samples"
    for companion, computed in wanted.items():
        if not _agree(saved.get(companion), computed):
            name, what = (f"{column.name}_{companion}", "value of the samples") if companion else (column.name, noun)
            yield f"{about.task}, {name}: the result is {saved.get(companion)}, but the {what} is {computed}."


def _of_editing_task(column: MetricColumn, about: TaskFacts, samples: Samples) -> dict[str, Any]:
    """The value, and the companions that the column has.

    Of the columns of ``compare_unedited``, which have no counts, that is the value.
    """
    aggregation = str(about.metrics[column.metric]["aggregation"])
    if aggregation in NOT_RECOMPUTED:
        return {}
    wanted: dict[str, Any] = {"": _value(column, samples, AGGREGATIONS[aggregation])}
    if column.stage in COMPARED:
        return wanted
    values = [sample[column.name] for sample in samples]
    if aggregation != COUNT or "n" in column.companions:  # a count of cases has no count of its own
        wanted["n"] = sum(value is not None for value in values)
    for count in ("excluded", "failed", "zeroed"):
        if count in column.companions:
            wanted[count] = sum(sample[f"{column.name}_{count}"] for sample in samples)
    if aggregation in STANDARD_ERRORS:
        wanted["stderr"] = AGGREGATIONS[STANDARD_ERRORS[aggregation]](values)
    if "or_0" in column.companions:
        wanted["or_0"] = mean_scored([sample[f"{column.name}_or_0"] for sample in samples])
    return wanted


def _value(
    column: MetricColumn, samples: Samples, aggregate: Callable[[Sequence[Any]], Any], *, paired: bool = False
) -> Any:
    """The aggregate of a column; with ``compare_unedited``, that of the unedited model, or the difference from it.

    Args:
        paired: the difference is over the documents that both models answered.
    """
    if column.stage not in COMPARED:
        return aggregate([sample[column.name] for sample in samples])
    unedited = [sample["unedited"][column.metric] for sample in samples]
    if column.stage == UNEDITED:
        return aggregate(unedited)
    pairs = [(sample[column.metric], before) for sample, before in zip(samples, unedited, strict=True)]
    if paired:
        pairs = [pair for pair in pairs if None not in pair]
    return aggregate([after for after, _ in pairs]) - aggregate([before for _, before in pairs])


def _agree(saved: object, computed: object) -> bool:
    """Whether two numbers are equal; what is no number is missing in both."""
    if not is_number(saved) or not is_number(computed):
        return not is_number(saved) and not is_number(computed)
    return math.isclose(saved, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
