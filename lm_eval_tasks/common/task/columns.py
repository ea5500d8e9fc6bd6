"""Columns of a task: which ones a metric has, how they are aggregated, and their values for one case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from lm_eval_tasks.common.asking.answers import NOT_IN_STREAM
from lm_eval_tasks.common.scoring.aggregation import AGGREGATIONS, STANDARD_ERRORS, retention_matrix
from lm_eval_tasks.common.scoring.breakdown import breakdown_columns
from lm_eval_tasks.common.scoring.measures import Score
from lm_eval_tasks.common.scoring.metric_list import is_rate
from lm_eval_tasks.common.task.stages import RETENTION, StreamStages

Aggregation: TypeAlias = Callable[[Sequence[Any]], Any]

# Endings of the column in which a case without a usable answer counts as 0, and of the number of these cases.
OR_ZERO, ZEROED = "_or_0", "_zeroed"


class DeclaredColumn(NamedTuple):
    """A column of ``process_results``, and whether more of it is better."""

    name: str
    aggregation: Aggregation
    higher_is_better: bool | None = None


# Columns of a task that are no metric.
SUMMARY_COLUMNS = (
    DeclaredColumn("unscored", AGGREGATIONS["total"]),
    DeclaredColumn("unscored_reason", AGGREGATIONS["reason_counts"]),
    DeclaredColumn("edit", AGGREGATIONS["edit_summary"]),
    DeclaredColumn("judge", AGGREGATIONS["judge_summary"]),
)


def columns_of_metric(
    metric: DeclaredColumn, stages: StreamStages, breakdown: Sequence[str], *, rate: bool
) -> Iterator[DeclaredColumn]:
    """The columns that a metric has besides its own.

    Args:
        breakdown: fields of the documents by which it is broken down.
        rate: it is a mean share of successes, so that a failure can count as 0.
    """
    name, aggregation, direction = metric
    yield from _companions(name, aggregation)
    if rate:
        yield DeclaredColumn(f"{name}{OR_ZERO}", aggregation, True)
        yield DeclaredColumn(f"{name}{ZEROED}", AGGREGATIONS["total"])
    for column, by_group in breakdown_columns(name, breakdown, aggregation).items():
        yield DeclaredColumn(column, by_group)
    for stage in stages.columns:
        yield DeclaredColumn(f"{name}@{stage}", aggregation, direction)
        yield from _companions(f"{name}@{stage}", aggregation)
    if stages.retention:
        matrix = partial(retention_matrix, cell=aggregation)
        yield DeclaredColumn(f"{name}@{RETENTION}", matrix)
        yield from _companions(f"{name}@{RETENTION}", matrix)


def _companions(column: str, aggregation: Aggregation) -> Iterator[DeclaredColumn]:
    """The counts and the standard error of a column.

    lm-eval computes standard errors for its own mean only. A per-case column ``<metric>_stderr`` is aggregated right
    after the metric and takes the place of lm-eval's "N/A" under the same key.
    """
    for ending in ("n", "excluded", "failed"):
        yield DeclaredColumn(f"{column}_{ending}", AGGREGATIONS["total"])
    for name, error in STANDARD_ERRORS.items():
        if aggregation is AGGREGATIONS[name]:
            yield DeclaredColumn(f"{column}_stderr", AGGREGATIONS[error])


def case_columns(metric: Mapping[str, Any], suffix: str, score: Score, reasons: dict[str, str]) -> dict[str, Any]:
    """The columns of one metric at one stage for one case.

    Adds the reason of an unscored metric to ``reasons``.
    """
    name, value = metric["metric"] + suffix, score.value
    if score.reason is not None:
        reasons[name] = score.reason
    columns: dict[str, Any] = {name: value}
    if metric["aggregation"] in STANDARD_ERRORS and suffix != f"@{RETENTION}":
        columns[f"{name}_stderr"] = value
    columns[f"{name}_n"] = int(value is not None)
    columns[f"{name}_failed"] = int(value is None and score.reason not in (None, NOT_IN_STREAM))
    if not suffix and is_rate(metric):
        columns |= {f"{name}{OR_ZERO}": 0.0 if score.failed else value, f"{name}{ZEROED}": int(score.failed)}
    if metric.get("filtered"):
        columns[f"{name}_excluded"] = int(score.excluded)
    elif score.excluded:
        raise AssertionError(f"metric {name} excludes a case but its YAML does not say which (filtered: ...)")
    return columns
