"""95% intervals of a score over cases: Wilson's, the BCa bootstrap, and the normal approximation.

None of them needs more than numpy. :meth:`lm_edit.results.statistics.case_scores.CaseScores.interval` and
:func:`lm_edit.results.statistics.of_rows.interval_of` choose between them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist, StatisticsError
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
# Of the bootstrap and of permutation tests: two-sided p-values of the latter go down to 2 / 5000.
RESAMPLES = 4999
NORMAL = NormalDist()
QUANTILE = NORMAL.inv_cdf((1 + LEVEL) / 2)
BATCH_NUMBERS = 2_000_000  # drawn at once by a resampling: 16 MB
KEPT_DRAWS = 20_000_000  # numbers of the resamples that are kept for the next score of as many cases: 40 MB
# Resamples of the same cases differ in the last digits of their sums.
TIE = 1e-12

Values: TypeAlias = NDArray[np.float64]
# (..., parts) sums over cases -> (...)
Score: TypeAlias = Callable[[Values], Values]
Method = Literal["Wilson", "BCa bootstrap", "normal approximation", "Newcombe"]


class Interval(NamedTuple):
    """A confidence interval, in the unit of the score."""

    low: float
    high: float
    method: Method

    @property
    def mark(self) -> str:
        """What stands before the ends in tables: ``~`` for the normal approximation."""
        return "~" if self.method == "normal approximation" else ""


def wilson_interval(successes: float, num_cases: int) -> Interval:
    """Wilson's 95% interval of a share of successes among independent cases (Wilson, 1927).

    Args:
        successes: their number; a mean over seeds need not be whole.
    """
    z2, share = QUANTILE**2, successes / num_cases
    center = (share + z2 / (2 * num_cases)) / (1 + z2 / num_cases)
    half = math.sqrt(share * (1 - share) / num_cases + z2 / (4 * num_cases**2)) * QUANTILE / (1 + z2 / num_cases)
    # Rounding would leave the ends of 0 of n and n of n near 0 and 1.
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == num_cases else center + half
    return Interval(low, high, "Wilson")


def normal_interval(value: float, stderr: float, *, is_share: bool) -> Interval:
    """The value and 1.96 standard errors to both sides; of a share, no further than 0 and 1."""
    low, high = value - QUANTILE * stderr, value + QUANTILE * stderr
    return Interval(*((max(0.0, low), min(1.0, high)) if is_share else (low, high)), "normal approximation")


def bootstrap_interval(units: Values, score: Score, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval | None:
    """The bias-corrected and accelerated (BCa) bootstrap interval over cases (Efron, 1987).

    It is that of ``scipy.stats.bootstrap``, for scores that follow from sums over cases: a resample is then a product
    of the numbers of times that it has each case with what each case adds.

    Args:
        units: (cases, *parts) terms of the sums; a row is what is drawn together.
        score: (..., *parts) sums -> (...).

    Returns:
        ``None`` for fewer than two cases, and if resamples all score the same or have no score.
    """
    if len(units) < 2:
        return None
    parts = units.shape[1:]
    terms = units.reshape(len(units), -1)
    totals = np.concatenate([counts @ terms for counts in _counts_of(len(units), resamples, seed)])
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = score(totals.reshape(-1, *parts))
        own = float(score(terms.sum(axis=0).reshape(parts)))
        without_one = score((terms.sum(axis=0) - terms).reshape(-1, *parts))
    if not (np.isfinite(drawn).all() and np.isfinite(without_one).all() and math.isfinite(own)):
        return None
    shares = _bca_shares(own, drawn, without_one)
    if shares is None:
        return None
    low, high = np.percentile(drawn, [100 * share for share in shares])
    return Interval(float(low), float(high), "BCa bootstrap")


def _bca_shares(own: float, drawn: Values, without_one: Values) -> tuple[float, float] | None:
    """The shares of the resamples below the ends of the interval; ``None`` if the resamples do not vary."""
    tie = TIE * max(1.0, abs(own))
    below = (drawn < own - tie).mean() / 2 + (drawn <= own + tie).mean() / 2  # ties count half, as in scipy
    distances = without_one.mean() - without_one
    spread = float((distances**2).sum())
    if np.ptp(drawn) <= tie or spread <= tie**2:
        return None
    acceleration = float((distances**3).sum()) / (6 * spread**1.5)
    try:
        bias = NORMAL.inv_cdf(float(below))
    except StatisticsError:  # all resamples are on one side of the score
        return None
    ends = (bias - QUANTILE, bias + QUANTILE)
    low, high = (NORMAL.cdf(bias + end / (1 - acceleration * end)) for end in ends)
    return low, high


def _counts_of(num_cases: int, resamples: int, seed: int) -> Iterator[Values]:
    """How often each resample has each case, some resamples at a time: (resamples, cases)."""
    if num_cases * resamples <= KEPT_DRAWS:
        counts = iter((_kept_counts(num_cases, resamples, seed),))
    else:
        counts = _draw_counts(num_cases, resamples, seed)
    for several in counts:
        step = max(1, BATCH_NUMBERS // num_cases)
        for start in range(0, len(several), step):
            yield several[start : start + step].astype(np.float64)


@functools.lru_cache(maxsize=2)
def _kept_counts(num_cases: int, resamples: int, seed: int) -> NDArray[np.uint16]:
    """All counts of a resampling: the columns of a task have as many cases, and need the same."""
    return np.concatenate(list(_draw_counts(num_cases, resamples, seed)))


def _draw_counts(num_cases: int, resamples: int, seed: int) -> Iterator[NDArray[np.uint16]]:
    generator = np.random.default_rng(seed)
    step = max(1, BATCH_NUMBERS // num_cases)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        chosen = generator.integers(0, num_cases, (size, num_cases))
        chosen += np.arange(size)[:, np.newaxis] * num_cases
        counts = np.bincount(chosen.ravel(), minlength=size * num_cases)
        yield counts.reshape(size, num_cases).astype(np.uint16)
