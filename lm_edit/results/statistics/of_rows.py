"""The 95% interval of a row of results: the rule that tables, figures and the leaderboard share.

1. Cases that each succeed or fail, each with its own edit: Wilson's interval.
2. Other scores that follow from their cases: the BCa bootstrap over cases, those under one edit drawn together.
3. Without the scores of single cases, as of runs without samples and of groups of tasks: Wilson's interval where the
   standard error shows that all cases scored 0 or 1, otherwise the normal approximation, which is always named. Of
   several seeds with the same cases, with an upper bound of the standard error (:func:`over_seeds`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_edit.results.files.runs import read_result_file
from lm_edit.results.filters import is_missing
from lm_edit.results.schema import CASE_COLUMNS
from lm_edit.results.statistics.case_scores import CaseScores, read_case_scores
from lm_edit.results.statistics.intervals import (
    RESAMPLES,
    Interval,
    Method,
    normal_interval,
    wilson_interval,
)
from lm_edit.results.tables import case_rows, make_frame

NOT_SCORED = "no case was scored"
INFINITE = "the score is infinite"
ALL_EQUAL = "all cases score the same, or there are fewer than two"
NO_SAMPLES = "the run has no samples (--log_samples)"
NOT_FROM_CASES = "the score does not follow from single cases"
METHODS: dict[Method, str] = {
    "Wilson": "Wilson's, where every case scores 0 or 1",
    "BCa bootstrap": "BCa bootstrap",
    "normal approximation": "normal approximation (1.96 standard errors) where scores of single cases are missing",
    "Newcombe": "Newcombe's, of areas under the ROC curve",
}
# Of the identity below, whose sides are computed in different ways.
TOLERANCE = 1e-9

_Column = tuple[str, str, str]  # metric, stage, filter


class Estimate(NamedTuple):
    """The interval of a score, or why it has none.

    Attributes:
        note: why there is no interval, or why it is not that of the cases; "" otherwise.
    """

    interval: Interval | None
    note: str


class Summary(NamedTuple):
    """What a result file has of a score.

    Attributes:
        is_share: declared as a mean share.
        stderr: NaN if unknown, as of means over seeds.
        num_scored: cases; 0 if unknown.
        each_own_edit: no cases were answered under one edit, as in groups.
    """

    value: float
    is_share: bool
    stderr: float = math.nan
    num_scored: int = 0
    each_own_edit: bool = True

    @property
    def successes(self) -> float | None:
        """Number of cases that score 1 if all others score 0, which the standard error shows; else ``None``.

        Over seeds it is the mean of their numbers.

        For scores x in 0..1, the sum of x^2 is that of x exactly if every x is 0 or 1. With the sample variance
        n stderr^2 that is stderr^2 (n - 1) = value (1 - value).
        """
        if not self.is_share or self.num_scored < 1 or math.isnan(self.stderr):
            return None
        variance = self.value * (1 - self.value)
        if not math.isclose(self.stderr**2 * (self.num_scored - 1), variance, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return None
        return self.value * self.num_scored


def over_seeds(seeds: Sequence[Summary]) -> Summary:
    """The mean over seeds that share their cases, with an upper bound of its standard error.

    Summaries do not show how a case's scores under the seeds are correlated. The standard deviation of their mean is at
    most the mean of their standard deviations. If all scores are 0 or 1, the bound is the standard error of successes
    with the mean share: p (1 - p) is the largest variance of a score between 0 and 1 with mean p.
    """
    value = math.fsum(one.value for one in seeds) / len(seeds)
    num_scored = min(one.num_scored for one in seeds)
    stderr = math.fsum(one.stderr for one in seeds) / len(seeds)
    if all(one.successes is not None for one in seeds) and num_scored > 1:
        stderr = math.sqrt(value * (1 - value) / (num_scored - 1))
    return seeds[0]._replace(value=value, stderr=stderr, num_scored=num_scored)


def estimate(
    summary: Summary, scores: CaseScores | None, *, resamples: int = RESAMPLES, without_scores: str = NO_SAMPLES
) -> Estimate:
    """The interval of a score by the rule of this module.

    Args:
        scores: of the cases; ``None`` if they are not at hand.
        without_scores: why they are not.
    """
    if math.isnan(summary.value):
        return Estimate(None, NOT_SCORED)
    if math.isinf(summary.value):
        return Estimate(None, INFINITE)
    if scores is not None and scores.gives(summary.value):
        interval = scores.interval(is_share=summary.is_share, resamples=resamples)
        return Estimate(interval, "" if interval else ALL_EQUAL)
    note = without_scores if scores is None else NOT_FROM_CASES
    if summary.each_own_edit and (successes := summary.successes) is not None:
        return Estimate(wilson_interval(successes, summary.num_scored), note)
    if summary.stderr > 0:
        return Estimate(normal_interval(summary.value, summary.stderr, is_share=summary.is_share), note)
    return Estimate(None, ALL_EQUAL if summary.stderr == 0 else note)


def summary_of(row: Mapping[str, Any]) -> Summary:
    """The summary of a row of :func:`lm_edit.load_results`."""

    def number(name: str) -> float:
        return math.nan if is_missing(row[name]) else float(row[name])

    num_scored = 0 if is_missing(row["n"]) else int(row["n"])
    return Summary(number("value"), bool(row["is_share"]), number("stderr"), num_scored, is_missing(row["group_size"]))


def interval_of(row: Mapping[str, Any]) -> Estimate:
    """The interval of a row of :func:`lm_edit.load_results`, from the samples beside its file if it has some.

    Raises:
        EditingError: for damaged samples.
    """
    summary = summary_of(row)
    file = Path(row["file"]) if isinstance(row["file"], str) else None
    if file is None or not file.is_file() or not math.isfinite(summary.value):
        return estimate(summary, None)  # a frame that was made, or saved and read, elsewhere
    column = (str(row["metric"]), str(row["stage"]), str(row["filter"]))
    return _interval_of(file, str(row["task"]), column, summary, file.stat().st_mtime_ns)


# A figure needs an interval for its whisker and for its caption.
@functools.lru_cache(maxsize=1024)
def _interval_of(file: Path, task: str, column: _Column, summary: Summary, changed: int) -> Estimate:
    return estimate(summary, _scores_of(file, task, changed).get(column))


@functools.lru_cache(maxsize=64)
def _scores_of(file: Path, task: str, changed: int) -> Mapping[_Column, CaseScores]:
    """Column -> scores of the cases of a task; empty without samples.

    Args:
        changed: time of the file, so that a file that was written again is read again.
    """
    results = read_result_file(file)
    if results.num_cases(task) is None or results.sample_file(task) is None:
        return {}
    cases = make_frame(list(case_rows(results, task)), CASE_COLUMNS)
    columns = cases.groupby(["metric", "stage", "filter"], sort=False)
    return {(str(metric), str(stage), str(name)): read_case_scores(rows) for (metric, stage, name), rows in columns}


def describe_intervals(estimates: Iterable[Estimate]) -> str:
    """The methods of intervals, and why some values have none, as the end of a sentence; "" without an interval."""
    known = list(estimates)
    methods = {one.interval.method for one in known if one.interval}
    if not methods:
        return ""
    used = ", ".join(text for method, text in METHODS.items() if method in methods)
    why = sorted({one.note for one in known if one.interval is None})
    return f"95% intervals over cases ({used})" + (f"; none where {' or '.join(why)}" if why else "")
