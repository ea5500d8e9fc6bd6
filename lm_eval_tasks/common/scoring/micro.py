"""Micro means: over the questions of all cases, beside the means over cases.

A metric is the mean over cases of each case's mean. With the setting ``micro`` it has a second column, in which every
question counts the same, so a case with more questions counts more. A metric that is no mean over questions, such as
one that any of several wordings can fulfill, counts a case once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_tasks.common.scoring.columns import SEPARATOR
from lm_eval_tasks.common.settings import MICRO, Settings

SUFFIX = "_micro"


def micro_metrics(metric: Mapping[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """The metric, and its mean over questions if the run reports it and the metric is a mean over cases."""
    plain = dict(metric)
    if metric["aggregation"] != "mean_scored" or not MICRO.read(settings):
        return [plain]
    rest = {key: value for key, value in plain.items() if key not in ("role", "headline")}
    name, at, population = metric["metric"].partition(SEPARATOR)
    micro = {"metric": f"{name}{SUFFIX}{at}{population}", "aggregation": "pooled_mean"}
    return [plain, {"over": metric["metric"], **rest, **micro, "weighted": True}]
