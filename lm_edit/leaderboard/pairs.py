"""Rows of a column against each other: which can be tested, their paired tests, and all pairs of editors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm_edit.leaderboard import significance
from lm_edit.leaderboard.board import Pair, Row
from lm_edit.leaderboard.columns import Column, ColumnKey
from lm_edit.leaderboard.significance import Comparison
from lm_edit.results.statistics.case_scores import CaseScores
from lm_edit.results.statistics.intervals import TIE


class Wins(NamedTuple):
    """Cases, of those that both rows scored, in which the first one is better, equal and worse."""

    wins: int
    ties: int
    losses: int


def is_testable(row: Row, key: ColumnKey) -> bool:
    """Whether the row's number of a column follows from scores of cases that are known."""
    return key in row.cells and key in row.scores and row.scores[key].gives(row.cells[key].value)


def compare_rows(row: Row, other: Row | None, key: ColumnKey, resamples: int) -> Comparison | None:
    """The paired test of two rows, not corrected."""
    return (
        None if other is None else significance.compare_runs(row.scores[key], other.scores[key], permutations=resamples)
    )


def compare_among(row: Row, other: Row, key: ColumnKey, resamples: int, num_pairs: int) -> Comparison | None:
    """The test, with more permutations where its smallest possible p-value could not pass the correction."""
    test = compare_rows(row, other, key, resamples)
    if test is None or test.test != "permutation" or test.p > 4 / (resamples + 1):
        return test
    needed = math.ceil(4 * num_pairs / significance.ALPHA)
    return test if needed <= resamples else compare_rows(row, other, key, needed)


def pairs_of(editors: Sequence[Row], column: Column, resamples: int) -> tuple[Pair, ...]:
    """Every two editors of a column, tests corrected by Holm over these pairs; places are those in ``editors``."""
    places = [place for place, row in enumerate(editors) if is_testable(row, column.key)]
    chosen = list(itertools.combinations(places, 2))
    rows = [(editors[first], editors[second]) for first, second in chosen]
    tests = [compare_among(*both, column.key, resamples, len(chosen)) for both in rows]
    sign = 1 if column.higher_is_better else -1
    found = []
    for (first, second), (row, other), test in zip(chosen, rows, significance.corrected(tests), strict=True):
        if test is not None:
            counts = count_wins(row.scores[column.key], other.scores[column.key], sign)
            wins, ties, losses = counts or (None, None, None)
            found.append(Pair(first, second, wins, ties, losses, test))
    return tuple(found)


def count_wins(scores: CaseScores, others: CaseScores, sign: int = 1) -> Wins | None:
    """Count cases by which run is better, over the mean of its seeds; ``None`` for scores that single cases lack."""
    if scores.factors is not None or others.factors is not None:
        return None
    found = []
    for one in (scores, others):
        kept = one.scored
        means = np.nanmean(one.values[kept, :, 0], axis=1)
        found.append(dict(zip(np.asarray(one.documents)[kept].tolist(), means.tolist(), strict=True)))
    first, second = found
    gaps = np.array([sign * (first[document] - second[document]) for document in first.keys() & second.keys()])
    wins, losses = int((gaps > TIE).sum()), int((gaps < -TIE).sum())
    return Wins(wins, len(gaps) - wins - losses, losses)
