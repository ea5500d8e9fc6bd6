"""Judging saved answers: the work behind ``lm-edit judge``."""

from __future__ import annotations



from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.errors import near_misses
from judges.base import CORRECT
from judges.base import Judge
from judges.base import Judged
from judges.base import Verdict
from judges.base import count_reasons
from judges.match import any_exact_match
from judges.match import match_ratio
from judges.similarity import SIMILARITIES
from judges.similarity import similarity
from lm_eval_tasks.common.aggregation import mean_scored
from lm_edit.results.samples import SavedAnswer

Values = Sequence["float | None"]


def judge_saved(judge: Judge, saved: Sequence[SavedAnswer]) -> Judged:
    """A verdict for every saved answer; those with nothing to judge are unscored with their reason."""
    found = judge.judge([one.item for one in saved if one.failed is None])
    queue = iter(found.verdicts)
    verdicts = [
        next(queue) if one.failed is None else Verdict(unscored_reason=one.failed, judge=judge.name) for one in saved
    ]
    # Coverage is about the judge: answers that never came are counted in the table, not held against it.
    return Judged(verdicts, replace(found.report, reasons=count_reasons(verdicts)))


def rows_of(
    saved: Sequence[SavedAnswer], columns: Mapping[str, Sequence[Verdict]], scores: Mapping[str, Values]
) -> Iterator[list[str]]:
    """A row per task, stage and subset: number of answers, share correct and scored per judge, exact match, scores.

    Where a task saved the unedited model's answers for it, a second row is about the cases it got wrong (the published
    subset): by each judge's own verdict, for exact match and scores by exact match.
    """
    em = [None if one.failed else float(any_exact_match(one.item.answer, _golds(one))) for one in saved]
    judged = {name: [_value(verdict) for verdict in verdicts] for name, verdicts in columns.items()}
    groups = list(dict.fromkeys((one.task, one.stage) for one in saved if not one.helper))
    for task, stage in groups:
        own = [n for n, one in enumerate(saved) if (one.task, one.stage) == (task, stage) and not one.helper]
        helpers = {one.case: n for n, one in enumerate(saved) if one.task == task and one.helper}
        name = task + (f"@{stage}" if stage else "")
        yield [name, "all", str(len(own)), *_cells(own, judged, em, scores, None)]
        if helpers:
            before = {n: helpers[saved[n].case] for n in own if saved[n].case in helpers}
            yield [name, "initially wrong", str(len(own)), *_cells(own, judged, em, scores, before)]


def _cells(
    own: Sequence[int], judged: Mapping[str, Values], em: Values, scores: Mapping[str, Values], before: Any
) -> list[str]:
    def kept(values: Values, known: Values) -> list[float | None]:
        chosen = own if before is None else [n for n in own if n in before and known[before[n]] == 0.0]
        return [values[n] for n in chosen]

    cells = []
    for values in judged.values():
        part = kept(values, values)
        cells += [_shown(mean_scored(part)), f"{sum(value is not None for value in part)}/{len(part)}"]
    return cells + [_shown(mean_scored(kept(values, em))) for values in (em, *scores.values())]


def scores_of(name: str, saved: Sequence[SavedAnswer]) -> list[float | None]:
    """A graded score of every answer in comparison with its gold answer; ``None`` where there is no answer.

    Raises:
        EditingError: for an unknown score, or a missing package.
    """
    if name != "match_ratio" and name not in SIMILARITIES:
        known = ["match_ratio", *SIMILARITIES]
        raise EditingError(f"score {name!r} is unknown.{near_misses(name, known)} Accepted: {', '.join(known)}.")
    there = [one.item for one in saved if one.failed is None]
    if name == "match_ratio":
        found = [match_ratio(item.answer, item.gold) for item in there]
    else:
        found = similarity(name, [item.answer for item in there], [item.gold for item in there])
    queue = iter(found)
    return [next(queue) if one.failed is None else None for one in saved]


def written(saved: Sequence[SavedAnswer], columns: Mapping[str, Sequence[Verdict]]) -> Iterator[dict[str, Any]]:
    """One JSON-able row per answer with the verdicts of all judges."""
    for place, one in enumerate(saved):
        verdicts = {
            name: {
                "verdict": column[place].label,
                "reason": column[place].unscored_reason,
                "reply": column[place].raw_reply,
                "prompt_hash": column[place].prompt_hash,
            }
            for name, column in columns.items()
        }
        item = {"question": one.item.question, "gold": one.item.gold, "answer": one.item.answer}
        yield {"task": one.task, "case": one.case, "stage": one.stage, "helper": one.helper, **item, "judges": verdicts}


def _golds(one: SavedAnswer) -> tuple[str, ...]:
    return (one.item.gold, *one.item.aliases)


def _value(verdict: Verdict) -> float | None:
    return None if verdict.label is None else float(verdict.label == CORRECT)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
