"""The metrics that a run of a task reports: those of its YAML whose conditions the settings fulfill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edit_hooks.utils.options import switch
from lm_eval_tasks.common.scoring.columns import TOTALS
from lm_eval_tasks.common.scoring.micro import micro_metrics
from lm_eval_tasks.common.scoring.population import population_metrics


def select_metrics(metric_list: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The metrics of this run; by default means, and higher is better. A total has no direction."""
    conditions = ("only_if", "only_with", "only_without")
    chosen = (
        {"aggregation": "mean_scored", "higher_is_better": None if listed.get("aggregation") in TOTALS else True}
        | {key: value for key, value in metric.items() if key not in conditions}
        for listed in metric_list
        if _applies(listed.get("only_if"), settings)
        and ("only_with" not in listed or settings.get(listed["only_with"]))
        and ("only_without" not in listed or not settings.get(listed["only_without"]))
        for metric in population_metrics(listed, settings)
    )
    return [metric for one in chosen for metric in micro_metrics(one, settings)]


def _applies(only_if: str | Mapping[str, Any] | None, metadata: Mapping[str, Any]) -> bool:
    """Whether a metric's condition holds: a switch that is on, or settings that all have one of the given values."""
    if isinstance(only_if, Mapping):
        return all(metadata.get(name) in _values(wanted) for name, wanted in only_if.items())
    return only_if is None or switch(metadata, only_if, True)


def _values(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def is_rate(metric: Mapping[str, Any]) -> bool:
    """Whether a metric is a mean share of successes."""
    return metric["aggregation"] == "mean_scored" and bool(metric["higher_is_better"]) and metric.get("rate", True)
