"""Paired tests between editors, and mean ranks over columns; intervals are in :mod:`lm_edit.results.statistics`.

Tests: exact McNemar for scores that are 0 or 1, otherwise a permutation test of the difference, in which the two runs
swap their scores of a case (for means: the signs of differences flip).
Correction: Holm. Ranks: Friedman's test with benchmarks as blocks, then Nemenyi's post-hoc test (Demsar, JMLR 2006).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edit_hooks.utils.errors import EditingError
from lm_edit.results.statistics.case_scores import CaseScores
from lm_edit.results.statistics.intervals import BATCH_NUMBERS, RESAMPLES, TIE, Score, Values

ALPHA = 0.05
INSTALL_COMMAND = 'pip install "lm-eval-editing[leaderboard]"'
PACKAGES = ("scipy", "statsmodels", "scikit_posthocs")
MIN_EDITORS = 3
MIN_BENCHMARKS = 3


class Comparison(NamedTuple):
    """A paired test of two runs on the cases that both scored.

    Attributes:
        test: ``mcnemar`` or ``permutation``.
        num_cases: cases with a score in both runs.
        difference: mean of the first minus mean of the second.
        p: two-sided p-value; after :func:`corrected`, adjusted.
    """

    test: str
    num_cases: int
    difference: float
    p: float


class Ranking(NamedTuple):
    """Mean ranks of editors over blocks.

    Attributes:
        names: editors, best mean rank first.
        mean_ranks: in the order of ``names``; 1 is best, ties share their mean.
        num_blocks: of the test.
        p: of Friedman's test.
        critical_difference: of Nemenyi's test at 0.05.
        groups: first and last position of each maximal run of editors that Nemenyi's test does not separate.
    """

    names: tuple[str, ...]
    mean_ranks: tuple[float, ...]
    num_blocks: int
    p: float
    critical_difference: float
    groups: tuple[tuple[int, int], ...]


def check_libraries() -> None:
    """Raise EditingError, with the extra to install, if a library of the statistics is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise EditingError(f"the leaderboard needs {', '.join(missing)}: {INSTALL_COMMAND}")


def compare_runs(scores: CaseScores, others: CaseScores, *, permutations: int = RESAMPLES) -> Comparison | None:
    """Compare two runs on the cases that both scored; ``None`` if there is no such case.

    Cases under one edit of either run are swapped together, and so are the scores of a case under all seeds.
    """
    shared = sorted(set(scores.documents) & set(others.documents))
    num_seeds = math.lcm(scores.num_seeds, others.num_seeds)
    both = [one.scored[np.isin(one.documents, shared)] for one in (scores, others)]
    kept = [document for document, first, second in zip(shared, *both, strict=True) if first and second]
    if not kept:
        return None
    edits = scores.edits_of(kept)
    edits = edits if any(edits) else others.edits_of(kept)
    first, second = (one.of_cases(np.isin(one.documents, kept), num_seeds, edits) for one in (scores, others))
    if first.factors is None and not first.is_pooled and first.groups is None:
        return compare_pairs(_over_seeds(first.values), _over_seeds(second.values), permutations=permutations)
    found = compare_pairs(first.units(), second.units(), permutations=permutations, score=first.of_sums)
    return found and found._replace(num_cases=len(kept))


def _over_seeds(values: Values) -> Values:
    """(cases, seeds, 1) -> (cases,): mean over the seeds with a score."""
    return np.asarray(np.nanmean(values[..., 0], axis=1))


def compare_pairs(
    values: Values, others: Values, *, permutations: int = RESAMPLES, seed: int = 0, score: Score | None = None
) -> Comparison | None:
    """Compare two runs case by case; ``None`` if they share no scored case, or their shared cases give no score.

    Args:
        values: (cases,) scores of the first run, NaN where unscored; or, with ``score``, (cases, *parts) terms of sums.
        others: those of the second run, in the same order of cases.
        permutations: of the permutation test, which is exact if there are fewer ways to swap the runs' cases.
        seed: of the permutations.
        score: (..., *parts) sums over cases -> (...); default: the mean of the scores.
    """
    if values.shape != others.shape:
        raise ValueError(f"cases of shape {values.shape} and {others.shape} cannot be paired")
    axes = tuple(range(1, values.ndim))
    both = np.isfinite(values).any(axis=axes) & np.isfinite(others).any(axis=axes)
    if not both.any():
        return None
    first, second = values[both], others[both]
    if score is not None:
        difference, p = _permutation(first, second, score, permutations, seed)
        return None if math.isnan(difference) else Comparison("permutation", len(first), difference, p)
    difference = float(np.mean(first) - np.mean(second))
    if np.isin(first, (0.0, 1.0)).all() and np.isin(second, (0.0, 1.0)).all():
        return Comparison("mcnemar", len(first), difference, _mcnemar(first, second))
    sums, others = first[:, np.newaxis], second[:, np.newaxis]
    _, p = _permutation(sums, others, lambda totals: totals[..., 0] / len(first), permutations, seed)
    return Comparison("permutation", len(first), difference, p)


def _mcnemar(first: Values, second: Values) -> float:
    from statsmodels.stats.contingency_tables import mcnemar

    table = [[int(np.sum((first == a) & (second == b))) for b in (1.0, 0.0)] for a in (1.0, 0.0)]
    return float(mcnemar(table, exact=True).pvalue)


def _permutation(first: Values, second: Values, score: Score, permutations: int, seed: int) -> tuple[float, float]:
    """Difference and p-value: the runs swap their results, case by case; exact if all ways fit into ``permutations``.

    The p-value is that of ``scipy.stats.permutation_test``, for scores that follow from sums over cases: the sums of a
    permutation are a product of its swaps with what a swap moves. Cases without a difference move nothing.
    """
    parts = first.shape[1:]
    moves = (second - first).reshape(len(first), -1)
    changed = moves.any(axis=1)
    ours, theirs = first.sum(axis=0), second.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = float(score(ours) - score(theirs))
    num_changed = int(changed.sum())
    if num_changed < 2:
        return difference, 1.0  # of a single difference, both signs are as extreme
    is_exact = 2.0**num_changed <= permutations
    drawn, moving = (2**num_changed, moves[changed]) if is_exact else (permutations, moves)
    swaps = _all_swaps(num_changed) if is_exact else _kept_swaps(len(first), permutations, seed)
    tie = TIE * max(1.0, abs(difference))
    num_below = num_above = 0 if is_exact else 1  # the observed one, see Phipson and Smyth (2010)
    step = max(1, BATCH_NUMBERS // len(moving))
    for start in range(0, drawn, step):
        several = np.unpackbits(swaps[start : start + step], axis=1, count=len(moving)).astype(np.float64)
        moved = (several @ moving).reshape(-1, *parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = score(ours + moved) - score(theirs - moved)
        # A way without a value, as of a score without any case, counts as at least as extreme on both sides.
        num_below += int((~(found > difference + tie)).sum())
        num_above += int((~(found < difference - tie)).sum())
    return difference, min(1.0, 2 * min(num_below, num_above) / (drawn + (not is_exact)))


def _all_swaps(num_cases: int) -> NDArray[np.uint8]:
    """Every choice of cases: (2 ** cases, bytes), a bit per case."""
    numbers = np.arange(2**num_cases)[:, np.newaxis]
    return np.packbits((numbers >> np.arange(num_cases)) & 1, axis=1)


@functools.lru_cache(maxsize=4)
def _kept_swaps(num_cases: int, permutations: int, seed: int) -> NDArray[np.uint8]:
    """The cases that each permutation swaps: (permutations, bytes), a bit per case; columns of a task share them."""
    return np.random.default_rng(seed).integers(0, 256, (permutations, -(-num_cases // 8)), dtype=np.uint8)


def corrected(comparisons: Sequence[Comparison | None], num_tests: int | None = None) -> list[Comparison | None]:
    """The comparisons of one family with p-values adjusted by Holm; ``None`` is kept and does not count.

    Args:
        num_tests: size of the family, if the comparisons are those of it that the data chose; an upper bound of Holm's
            adjustment of the whole family, whose other p-values are not needed.
    """
    tests = [test for test in comparisons if test is not None]
    family = len(tests) if num_tests is None else num_tests
    # Not by statsmodels' multipletests, which collects garbage in every call: minutes for a table.
    order = np.argsort([test.p for test in tests], kind="stable")
    factors = np.arange(family, family - len(tests), -1)
    adjusted = np.empty(len(tests))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.array([test.p for test in tests])[order]))
    remaining = iter(adjusted)
    return [None if test is None else test._replace(p=float(next(remaining))) for test in comparisons]


def rank_editors(names: Sequence[str], scores: Sequence[Sequence[float]], benchmarks: Sequence[str]) -> Ranking | None:
    """Mean ranks, Friedman's test and Nemenyi's groups.

    Args:
        names: k editors.
        scores: (k, columns), higher is better, complete.
        benchmarks: of the columns. Columns of one benchmark are about the same cases, so each benchmark is one block:
            its editors are ranked by their mean rank over its columns.

    Returns:
        ``None`` for fewer than three editors or three benchmarks, and if all of these tie all editors.
    """
    import scikit_posthocs
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    if len(names) < MIN_EDITORS or len(set(benchmarks)) < MIN_BENCHMARKS:
        return None
    column_ranks = rankdata(-np.asarray(scores, dtype=np.float64).T, axis=1)  # (columns, editors)
    of_columns = np.array(list(benchmarks))
    sums = [column_ranks[of_columns == name].sum(axis=0) for name in dict.fromkeys(benchmarks)]
    ranks = rankdata(np.array(sums), axis=1)  # (benchmarks, editors)
    if np.all(ranks == ranks[0, 0]):
        return None
    mean_ranks = ranks.mean(axis=0)
    order = sorted(range(len(names)), key=lambda editor: (mean_ranks[editor], names[editor]))
    # Ranks are computed here once, ties averaged, so that both tests see the same ones.
    p_values = scikit_posthocs.posthoc_nemenyi_friedman(-ranks).to_numpy()
    num_blocks, num_editors = ranks.shape
    quantile = studentized_range.ppf(1 - ALPHA, num_editors, np.inf) / np.sqrt(2)
    return Ranking(
        names=tuple(names[editor] for editor in order),
        mean_ranks=tuple(float(mean_ranks[editor]) for editor in order),
        num_blocks=num_blocks,
        p=float(friedmanchisquare(*(-ranks).T).pvalue),
        critical_difference=float(quantile * np.sqrt(num_editors * (num_editors + 1) / (6 * num_blocks))),
        groups=_groups(p_values[np.ix_(order, order)]),
    )


def _groups(p_values: Values) -> tuple[tuple[int, int], ...]:
    """Maximal runs of consecutive editors in which no pair differs significantly."""
    groups: list[tuple[int, int]] = []
    for start in range(len(p_values)):
        end = start
        while end + 1 < len(p_values) and np.all(p_values[start : end + 1, end + 1] >= ALPHA):
            end += 1
        if end > start and (not groups or end > groups[-1][1]):
            groups.append((start, end))
    return tuple(groups)
