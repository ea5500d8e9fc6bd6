"""Verdicts and scores for saved answers, and the tables of ``lm-edit judge``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from edit_hooks.utils.errors import EditingError, near_misses
from judges.base import CORRECT, Judge, Judgment, Verdict, count_reasons
from judges.match import any_exact_match, match_ratio
from judges.similarity import SIMILARITIES, require_packages, similarity
from lm_edit.results.answers.sample_files import SampleFile
from lm_edit.results.answers.samples import SavedAnswer
from lm_eval_tasks.common.scoring.aggregation import mean_scored

Values: TypeAlias = Sequence[float | None]

MATCH_RATIO = "match_ratio"


def judge_answers(judge: Judge, answers: Sequence[SavedAnswer]) -> Judgment:
    """A verdict for every saved answer; those without a text are unscored."""
    judged = judge.judge([answer.item for answer in answers if answer.failure is None])
    queue = iter(judged.verdicts)
    verdicts = [
        next(queue) if answer.failure is None else Verdict(unscored_reason=answer.failure, judge=judge.name)
        for answer in answers
    ]
    # Coverage measures the judge: missing answers appear in the table and do not lower it.
    return Judgment(verdicts, replace(judged.report, reasons=count_reasons(verdicts)))


def check_score(name: str) -> None:
    """Check that a score can be computed, before anything is paid for.

    Raises:
        EditingError: for an unknown score, or a missing package.
    """
    known = [MATCH_RATIO, *SIMILARITIES]
    if name not in known:
        raise EditingError(f"score {name!r} is unknown.{near_misses(name, known)} Accepted: {', '.join(known)}.")
    if name != MATCH_RATIO:
        require_packages(name)


def score_answers(name: str, answers: Sequence[SavedAnswer]) -> list[float | None]:
    """A graded score of every answer against its gold answer, or ``None``.

    Args:
        name: ``match_ratio`` or a key of :data:`judges.similarity.SIMILARITIES`.

    Raises:
        EditingError: for an unknown score, or a missing package.
    """
    check_score(name)
    items = [answer.item for answer in answers if answer.failure is None]
    if name == MATCH_RATIO:
        scores = [match_ratio(item.answer, item.gold) for item in items]
    else:
        scores = similarity(name, [item.answer for item in items], [item.gold for item in items])
    queue = iter(scores)
    return [next(queue) if answer.failure is None else None for answer in answers]


def table_rows(
    answers: Sequence[SavedAnswer], verdicts: Mapping[str, Sequence[Verdict]], scores: Mapping[str, Values]
) -> Iterator[list[str]]:
    """Rows of the table: one per run, task, stage and subset.

    Where a run saved helper answers of the unedited model to a task, a second row covers the cases that it got wrong
    (the published subset): by each judge's own verdict, and for exact match and scores by exact match.

    Args:
        verdicts: judge -> verdicts in the order of ``answers``.
        scores: name -> scores in the order of ``answers``.

    Yields:
        Run, task, subset, number of answers; per judge the share correct and the number scored; exact match; the
        scores.
    """
    exact = [None if answer.failure else float(_matches_exactly(answer)) for answer in answers]
    judged = {name: [_value(verdict) for verdict in column] for name, column in verdicts.items()}
    by_stage: dict[SampleFile, dict[str, list[int]]] = {}
    helpers: dict[SampleFile, dict[int, int]] = {}  # source -> case -> index of its helper answer
    for index, answer in enumerate(answers):
        if answer.is_helper:
            helpers.setdefault(answer.source, {})[answer.case] = index
        else:
            by_stage.setdefault(answer.source, {}).setdefault(answer.stage, []).append(index)
    labels = _run_labels(by_stage)
    for source, stages in by_stage.items():
        helper_of_case = helpers.get(source, {})
        for stage, own in stages.items():
            place = [labels[source], source.task + (f"@{stage}" if stage else "")]
            yield [*place, "all", str(len(own)), *_cells(own, judged, exact, scores, None)]
            if helper_of_case:
                cases = {index: answers[index].case for index in own}
                helper_of = {index: helper_of_case[case] for index, case in cases.items() if case in helper_of_case}
                yield [*place, "initially wrong", str(len(own)), *_cells(own, judged, exact, scores, helper_of)]


def _run_labels(sources: Collection[SampleFile]) -> dict[SampleFile, str]:
    """The name of each source's run, or its path where the run is unknown or another has the same name and task."""
    counts = Counter((source.run_name, source.task) for source in sources)
    return {
        source: source.run_name if source.run_name and counts[source.run_name, source.task] == 1 else source.path
        for source in sources
    }


def _cells(
    own: Sequence[int],
    judged: Mapping[str, Values],
    exact: Values,
    scores: Mapping[str, Values],
    helper_of: Mapping[int, int] | None,
) -> list[str]:
    """The numeric cells of one row.

    Args:
        own: indices of the row's answers.
        helper_of: index of an answer -> index of its helper answer, to keep only initially wrong cases.
    """

    def select(values: Values, known: Values) -> list[float | None]:
        if helper_of is None:
            return [values[index] for index in own]
        return [values[index] for index in own if index in helper_of and known[helper_of[index]] == 0.0]

    cells = []
    for values in judged.values():
        subset = select(values, values)
        cells += [_format(mean_scored(subset)), f"{sum(value is not None for value in subset)}/{len(subset)}"]
    return cells + [_format(mean_scored(select(values, exact))) for values in (exact, *scores.values())]


def verdict_rows(answers: Sequence[SavedAnswer], verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[dict[str, Any]]:
    """One JSON-able row per answer with the verdicts of all judges."""
    for index, answer in enumerate(answers):
        by_judge = {
            name: {
                "verdict": column[index].label,
                "reason": column[index].unscored_reason,
                "reply": column[index].raw_reply,
                "prompt_hash": column[index].prompt_hash,
            }
            for name, column in verdicts.items()
        }
        item = {"question": answer.item.question, "gold": answer.item.gold, "answer": answer.item.answer}
        source = answer.source
        of_file = {"file": source.path, "run": source.run, "run_name": source.run_name, "task": source.task}
        place = {**of_file, "case": answer.case, "stage": answer.stage, "helper": answer.is_helper}
        yield {**place, **item, "judges": by_judge}


def _matches_exactly(answer: SavedAnswer) -> bool:
    return any_exact_match(answer.item.answer, (answer.item.gold, *answer.item.aliases))


def _value(verdict: Verdict) -> float | None:
    return None if verdict.label is None else float(verdict.label == CORRECT)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
