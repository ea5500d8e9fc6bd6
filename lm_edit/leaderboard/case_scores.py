"""Scores of single cases, and how a column's value follows from them: a mean, a pooled mean, or an edit score."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm_edit.leaderboard.significance import Comparison, Interval, Values, bootstrap_interval, compare_pairs

# A mean over cases may be summed in another order than the score.
TOLERANCE = 1e-6


class CaseScores(NamedTuple):
    """Scores of a run's cases in one column.

    Attributes:
        documents: (cases,) ids, sorted.
        values: (cases, components); NaN where unscored. A mean over cases has one component, a pooled mean two: the
            mean of the case's units, and their weight.
        factors: for an edit score, the factor of each component; ``None`` for a mean.
        reasons: why cases have no score -> number of cases; excluded cases are not in it.
        is_pooled: the score is the mean over the units of all cases, as chains or questions.
    """

    documents: tuple[int, ...]
    values: Values
    factors: tuple[int, ...] | None
    reasons: dict[str, int]
    is_pooled: bool = False

    @property
    def num_scored(self) -> int:
        """Cases with a score of some component."""
        return int(np.isfinite(self.values).any(axis=1).sum())

    def score(self, values: Values) -> Values:
        """(..., cases, components) -> (...); NaN if a component is scored in no case."""
        if self.is_pooled:
            with np.errstate(invalid="ignore"):  # no scored case
                return np.nansum(values.prod(axis=-1), axis=-1) / np.nansum(values[..., 1], axis=-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a component that is scored in no case
            means = np.nanmean(values, axis=-2)
        return means[..., 0] if self.factors is None else edit_score(means, self.factors)

    def gives(self, value: float) -> bool:
        """Whether the column's value follows from these scores."""
        return bool(math.isclose(float(self.score(self.values)), value, rel_tol=TOLERANCE, abs_tol=TOLERANCE))

    def interval(self, resamples: int) -> Interval | None:
        """Bootstrap interval over cases."""
        if self.factors is not None:
            return bootstrap_interval(self.values, resamples=resamples, score=self.score)
        scored = self.values[np.isfinite(self.values[:, 0])]
        if self.is_pooled and len(set(scored[:, 0])) > 1:
            return bootstrap_interval(scored, resamples=resamples, score=self.score)
        return bootstrap_interval(scored[:, 0], resamples=resamples)

    def compared(self, other: CaseScores, resamples: int) -> Comparison | None:
        """Paired test on the cases of both runs; ``None`` if there is no such case."""
        shared = sorted(set(self.documents) & set(other.documents))
        first, second = (scores.values[np.isin(scores.documents, shared)] for scores in (self, other))
        if self.factors is None and not self.is_pooled:
            return compare_pairs(first[:, 0], second[:, 0], permutations=resamples)
        return compare_pairs(first, second, permutations=resamples, score=self.score)


def edit_score(means: Values, factors: Sequence[int]) -> Values:
    """Harmonic mean of factors, each the mean of its components; as published, of percentages with two decimals.

    See :func:`lm_eval_tasks.common.aggregation.harmonic_of_means`.

    Args:
        means: (..., components), in 0..1.
        factors: number of the factor that each component belongs to.
    """
    percentages = np.round(100 * means, 2)
    numbers = sorted(set(factors))
    parts = np.stack([percentages[..., np.equal(factors, number)].mean(axis=-1) for number in numbers], axis=-1)
    with np.errstate(divide="ignore"):
        return np.where((parts == 0).any(axis=-1), 0.0, len(numbers) / (1 / parts).sum(axis=-1)) / 100


def read_case_scores(rows: pd.DataFrame) -> CaseScores:
    """Scores of one column of a run, from its rows of :func:`lm_edit.results.load_cases`."""
    rows = rows.sort_values("doc_id")
    documents = tuple(int(document) for document in rows["doc_id"])
    plain = pd.to_numeric(rows["value"], errors="coerce").to_numpy(dtype=np.float64)
    saved = rows["components"].tolist() if "components" in rows else []
    composite, pooled = _components(saved), _pooled(saved)
    values, factors = composite or (plain[:, np.newaxis] if pooled is None else pooled, None)
    unscored = np.isnan(values).all(axis=1) & (rows["excluded"].fillna(0) == 0).to_numpy()
    reasons = rows["reason"][unscored].value_counts()
    return CaseScores(
        documents,
        values,
        factors,
        {str(name): int(reasons[name]) for name in sorted(reasons.index)},
        pooled is not None,
    )


def _components(saved: Sequence[object]) -> tuple[Values, tuple[int, ...]] | None:
    """(cases, components) and factors of saved edit scores ``[[ES], [GS], [LS], [RQS, RJS]]``; else ``None``."""
    shapes = {tuple(map(len, case)) for case in saved if isinstance(case, list) and _is_nested(case)}
    if len(shapes) != 1 or not all(case is None or _is_nested(case) for case in saved):
        return None
    (lengths,) = shapes
    size = sum(lengths)
    flat = [
        [math.nan if part is None else float(part) for factor in case for part in factor]
        if isinstance(case, list)
        else [math.nan] * size
        for case in saved
    ]
    return np.asarray(flat, dtype=np.float64), tuple(
        number for number, length in enumerate(lengths) for _ in range(length)
    )


def _pooled(saved: Sequence[object]) -> Values | None:
    """(cases, 2) values and weights of saved pooled means ``{"value": ..., "weight": ...}``; else ``None``."""
    cases = [case for case in saved if isinstance(case, Mapping)]
    if not cases or any(set(case) != {"value", "weight"} for case in cases):
        return None
    return np.asarray(
        [
            [float(case["value"]), float(case["weight"])] if isinstance(case, Mapping) else [math.nan, math.nan]
            for case in saved
        ],
        dtype=np.float64,
    )


def _is_nested(case: object) -> bool:
    """Whether a saved value is a list of lists of numbers."""
    return isinstance(case, list) and all(
        isinstance(factor, list) and all(part is None or isinstance(part, (int, float)) for part in factor)
        for factor in case
    )
