"""One population for all columns: the cases whose edit question the unedited model answers wrongly.

The published results of WILD are over these cases only. With the setting ``population`` a document has a helper probe,
and every metric that says ``filtered_by: population`` a second column, ``<metric>@<population>``:

- ``wrong_em``: the unedited model's answer is wrong by exact match.
- ``wrong_judge``: it is wrong by the judge's verdict, as published.

The helper (:func:`lm_eval_tasks.protocols.wild.with_helper`) asks in the run's ``wild_context``, by default the QA
instruction, whatever the task itself asks, so that columns of different tasks are over the same cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from judges.base import Verdict
from judges.match import exact_match
from lm_eval_tasks.common.asking.probes import PLACEHOLDER, CaseAnswers
from lm_eval_tasks.common.scoring.columns import ALL_CASES, over
from lm_eval_tasks.common.scoring.measures import Measure, Unscored, exclude_if, generated_match, judged_correct
from lm_eval_tasks.common.settings import Settings, choice_setting

WRONG_EM, WRONG_JUDGE = "wrong_em", "wrong_judge"
POPULATIONS = (ALL_CASES, WRONG_EM, WRONG_JUDGE)

PRE_EDIT = "pre_edit"  # kind of the helper probe


POPULATION = choice_setting(
    "population",
    "also report the cases that the unedited model answers wrongly, by exact match or by the judge",
    POPULATIONS,
)


def population_metrics(metric: Mapping[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """The metric, and its column over the run's population if it has one."""
    plain = {key: value for key, value in metric.items() if key != "filtered_by"}
    if metric.get("filtered_by") != POPULATION.name or (population := POPULATION.read(settings)) == ALL_CASES:
        return [plain]
    rest = {key: value for key, value in plain.items() if key not in ("role", "chance")}
    name = metric["metric"]
    restricted = {"filtered": POPULATION.name, "population": population, "over": name}
    return [plain, {**rest, "metric": over(name, population), **restricted}]


def restrict(measure: Measure, metric: Mapping[str, Any], answers: CaseAnswers) -> Measure:
    """The measure of a metric over its population; that of a metric without one is unchanged.

    So is that of a case without questions, which has no helper either: it is unscored for that reason.
    """
    if (population := metric.get("population")) is None or answers.probes[0].probe.kind == PLACEHOLDER:
        return measure
    return exclude_if(measure, lambda: answers_correctly(answers, population))


def answers_correctly(answers: CaseAnswers, population: str) -> float:
    """1 if the unedited model answers the edit question correctly.

    Raises:
        Unscored: there is no answer, or no verdict about it.
    """
    (helper,) = answers.of_kind(PRE_EDIT)
    answer = helper.generation
    if population == WRONG_JUDGE:
        return judged_correct(answer)
    if not isinstance(answer, Verdict):
        return generated_match(answer, helper.probe.gold, unedited=True)
    if answer.answer is None:
        raise Unscored("the verdict about the unedited model's answer lacks that answer")
    return float(exact_match(answer.answer, helper.probe.gold))
