"""Columns of a task in result and sample files: metrics, and the companions that count their cases."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

SUMMARIES = ("unscored", "unscored_reason", "edit", "judge", "bypass")  # columns of a task that are no metric
SEPARATOR = "@"  # before a population, and before a stage: ``efficacy_match@wrong_em@immediate``
ALL_CASES = "all"  # the population of a metric without its benchmark's published filter
STAGES = ("immediate", "retention", "unedited", "difference")  # besides numbers of cases
COMPANIONS = ("stderr", "n", "excluded", "failed", "or_0", "zeroed")
NOT_AVAILABLE = "N/A"
TOTALS = ("total_scored", "total")  # the aggregations of counts, of which none is better


@dataclass
class MetricColumn:
    """One metric at one stage in one filter pipeline.

    Attributes:
        metric: name without the stage, with the population.
        stage: "" for the final answer; ``immediate``, a number of cases, ``unedited`` or ``difference``.
        filter: name of the filter pipeline; in samples, which hold one pipeline each, "".
        value: as saved.
        companions: ending -> value, as in ``{"n": 20, "failed": 1}``.
    """

    metric: str
    stage: str
    filter: str
    value: Any
    companions: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the column in the file, without the filter."""
        return at_stage(self.metric, self.stage)

    def number(self, companion: str) -> float | None:
        """A companion as a number; ``None`` if it is absent or not available."""
        value = self.companions.get(companion)
        return float(value) if is_number(value) else None


def over(metric: str, population: str) -> str:
    """Name of a metric over a population."""
    return f"{metric}{SEPARATOR}{population}"


def at_stage(metric: str, stage: str) -> str:
    """Name of the column of a metric at a stage; "" is the final answer."""
    return f"{metric}{SEPARATOR}{stage}" if stage else metric


def split_stage(name: str) -> tuple[str, str]:
    """The metric of a column, with its population, and its stage; "" for the final answer."""
    metric, _, last = name.rpartition(SEPARATOR)
    return (metric, last) if metric and (last in STAGES or last.isdecimal()) else (name, "")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a saved value is a number; lm-eval writes "N/A" for missing ones."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def same_up_to_last_digits(value: float, other: float) -> bool:
    """Whether two scores are equal up to the last digits, which depend on the batch."""
    return math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6)


def read_columns(saved: Mapping[str, Any], declared: Collection[str] = ()) -> Iterator[MetricColumn]:
    """The metrics among the columns of a task, each with its companions.

    Args:
        saved: ``<column>,<filter>`` -> value, or ``<column>`` -> value in samples.
        declared: metrics that the task declares; their names are never companions of others.
    """
    columns: dict[tuple[str, str], MetricColumn] = {}
    later = []
    for key, value in saved.items():
        name, _, pipeline = key.partition(",")
        base, ending = _companion(name, saved, pipeline, declared)
        if base:
            later.append((base, ending, pipeline, value))
        elif name not in SUMMARIES:
            metric, stage = split_stage(name)
            columns[name, pipeline] = MetricColumn(metric, stage, pipeline, value)
    for base, ending, pipeline, value in later:
        if column := columns.get((base, pipeline)):
            column.companions[ending] = value
    yield from columns.values()


def _companion(name: str, saved: Mapping[str, Any], pipeline: str, declared: Collection[str]) -> tuple[str, str]:
    """The column that a column accompanies, and how; two empty texts for a column of its own."""
    if name not in declared:
        for ending in COMPANIONS:
            base = name.removesuffix(f"_{ending}")
            if base != name and (f"{base},{pipeline}" if pipeline else base) in saved:
                return base, ending
    return "", ""
