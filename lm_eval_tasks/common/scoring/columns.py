"""Columns of a task in result and sample files: metrics, and the companions that count their cases."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

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
    for key, metric, stage, pipeline, companions in _layout(tuple(saved), frozenset(declared)):
        yield MetricColumn(metric, stage, pipeline, saved[key], {ending: saved[name] for ending, name in companions})


class _Place(NamedTuple):
    """A metric among the columns of a task; ``companions`` are pairs of ending and key."""

    key: str
    metric: str
    stage: str
    filter: str
    companions: list[tuple[str, str]]


@functools.lru_cache(maxsize=256)
def _layout(keys: tuple[str, ...], declared: frozenset[str]) -> list[_Place]:
    """The metrics among these keys; every sample of a task has the same ones."""
    places: dict[tuple[str, str], _Place] = {}
    later = []
    for key in keys:
        name, _, pipeline = key.partition(",")
        base, ending = _companion(name, keys, pipeline, declared)
        if base:
            later.append((base, pipeline, ending, key))
        elif name not in SUMMARIES:
            places[name, pipeline] = _Place(key, *split_stage(name), pipeline, [])
    for base, pipeline, ending, key in later:
        if place := places.get((base, pipeline)):
            place.companions.append((ending, key))
    return list(places.values())


def _companion(name: str, keys: Collection[str], pipeline: str, declared: Collection[str]) -> tuple[str, str]:
    """The column that a column accompanies, and how; two empty texts for a column of its own."""
    if name not in declared:
        for ending in COMPANIONS:
            base = name.removesuffix(f"_{ending}")
            if base != name and (f"{base},{pipeline}" if pipeline else base) in keys:
                return base, ending
    return "", ""
