"""The metrics that a run of a task reports: those of its YAML whose conditions the settings fulfill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edit_hooks.utils.settings.options import switch
from lm_eval_tasks.common.scoring.columns import TOTALS
from lm_eval_tasks.common.scoring.micro import micro_metrics
from lm_eval_tasks.common.scoring.population import population_metrics

# Which cases a metric excludes (its key ``filtered``): those of the published filter; those that the unedited model
# answers already, a filter of ours in the same form; those whose record has no question of the metric; those outside
# its population.
CLAUSES = {
    "published": "excluded by the published filter from {columns}",
    "known": "excluded from {columns}: the unedited model has that answer already",
    "not_asked": "without a question of {columns}",
    "not_counted": "without a test of {columns} whose conditions the unedited model meets",
    "population": "outside the population of {columns}",
}


def exclusion_clause(metric: Mapping[str, Any]) -> str:
    """Why a metric excludes cases: the end of a clause "3 of 8 cases ...", with a place for the columns' names."""
    return CLAUSES.get(str(metric.get("filtered")), "excluded from {columns}")


def select_metrics(metric_list: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of this run; by default means, and higher is better.

    A total has no direction, nor has a metric of the unedited model, which is no success of an edit either.
    """
    conditions = ("only_if", "only_with", "only_without")
    chosen = (
        _defaults(listed) | {key: value for key, value in metric.items() if key not in conditions}
        for listed in metric_list
        if _applies(listed.get("only_if"), settings)
        and ("only_with" not in listed or settings.get(listed["only_with"]))
        and ("only_without" not in listed or not settings.get(listed["only_without"]))
        for metric in population_metrics(listed, settings)
    )
    return [metric for one in chosen for metric in micro_metrics(one, settings)]


def _defaults(listed: Mapping[str, Any]) -> dict[str, Any]:
    if listed.get("model") == "unedited":
        return {"aggregation": "mean_scored", "higher_is_better": None, "rate": False}
    return {"aggregation": "mean_scored", "higher_is_better": None if listed.get("aggregation") in TOTALS else True}


def _applies(only_if: str | Mapping[str, Any] | None, metadata: Mapping[str, Any]) -> bool:
    """Whether a metric's condition holds: a switch that is on, or settings that all have one of the given values."""
    if isinstance(only_if, Mapping):
        return all(metadata.get(name) in _values(wanted) for name, wanted in only_if.items())
    return only_if is None or switch(metadata, only_if, True)


def _values(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def declared_metrics(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Metric -> what a task declares about it, from the config that results save."""
    listed = [*(config.get("metric_list") or ()), *(config.get("other_metrics") or ())]
    return {metric["metric"]: metric for metric in listed if isinstance(metric.get("metric"), str)}


def is_rate(metric: Mapping[str, Any]) -> bool:
    """Whether a metric is a mean share of successes."""
    return metric["aggregation"] == "mean_scored" and bool(metric["higher_is_better"]) and metric.get("rate", True)
