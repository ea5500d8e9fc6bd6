"""Columns that no record of a task's data can fill, found before any model is asked.

KnowGIC has columns for chains of over five steps, which no published chain has; records without old answers have no
likelihood comparison. Such a column would be unscored in every case. Each scorer is called once per document with
answers that say they are pending: a column can be filled if, in some document, its value waits for such an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from edit_hooks.answers import FailedAnswer
from lm_eval_tasks.common.asking.probes import CaseAnswers, case_requests
from lm_eval_tasks.common.scoring.measures import Measure, evaluate, parts_of
from lm_eval_tasks.common.scoring.population import restrict

LEFT_OUT = "columns_left_out"  # key of ``data_source``: the metrics that no record can fill
PENDING = FailedAnswer("not asked yet", is_failure=False)

# (document, answers, metrics) -> the measure of each metric
Measures = Callable[[Mapping[str, Any], CaseAnswers, Sequence[Mapping[str, Any]]], Mapping[str, Measure]]


def unfillable(
    docs: Iterable[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], measures_of: Measures
) -> list[str]:
    """The metrics that are unscored or excluded in every document, whatever a model answers.

    A value with several components, as an edit score, needs each of them in some document. If no metric can be filled,
    none is named: the reasons of an empty table are of more use than no table.
    """
    missing = {metric["metric"]: metric for metric in metrics}
    filled: dict[str, set[int]] = {name: set() for name in missing}
    for doc in docs:
        if not missing:
            break
        if doc.get("unusable"):
            continue
        answers = CaseAnswers(doc, [PENDING for _ in case_requests(doc)])
        for name, measure in measures_of(doc, answers, list(missing.values())).items():
            parts = parts_of(restrict(measure, missing[name], answers))
            filled[name] |= {number for number, part in enumerate(parts) if _waits_for_an_answer(part)}
            if len(filled[name]) == len(parts):
                del missing[name]
    return [] if len(missing) == len(filled) else list(missing)


def _waits_for_an_answer(measure: Measure) -> bool:
    score = evaluate(measure)
    return score.value is not None or PENDING.reason in (score.reason or "")
