"""Scores of single cases, and how a column's value follows from them: a mean, a pooled mean, or an edit score."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from edit_hooks.utils.readable import readable
from lm_edit.leaderboard.significance import (
    Comparison,
    Interval,
    Values,
    bootstrap_interval,
    compare_pairs,
    wilson_interval,
)
from lm_eval_tasks.common.scoring.columns import is_number

# A mean over cases may be summed in another order than the score.
TOLERANCE = 1e-6


@readable
class CaseScores(NamedTuple):
    """Scores of a run's cases in one column.

    Attributes:
        documents: (cases,) ids, sorted.
        values: (cases, seeds, components); NaN where unscored. A mean over cases has one component, a pooled mean two:
            the mean of the case's units, and their weight. Runs of several seeds have the mean of their scores.
        factors: for an edit score, the factor of each component; ``None`` for a mean.
        reasons: why cases have no score -> number of cases; excluded cases are not in it.
        is_pooled: the score is the mean over the units of all cases, as chains or questions.
        edits: (cases,) the edit under which each case was answered; "" where it is not one of several edits.
        num_not_due: cases that are not edited yet at the column's stage.
    """

    documents: tuple[int, ...]
    values: Values
    factors: tuple[int, ...] | None
    reasons: dict[str, int]
    is_pooled: bool = False
    edits: tuple[str, ...] = ()
    num_not_due: int = 0

    @property
    def num_due(self) -> int:
        """Cases that are asked at the column's stage."""
        return len(self.documents) - self.num_not_due

    @property
    def num_seeds(self) -> int:
        """Runs whose scores these are."""
        return int(self.values.shape[1])

    @property
    def num_scored(self) -> int:
        """Cases with a score of some component."""
        return int(np.isfinite(self.values).any(axis=(1, 2)).sum())

    def score(self, values: Values) -> Values:
        """(..., cases, seeds, components) -> (...); NaN if a component is scored in no case of a seed."""
        if self.is_pooled:
            with np.errstate(invalid="ignore"):  # no scored case
                pooled = np.nansum(values.prod(axis=-1), axis=-2) / np.nansum(values[..., 1], axis=-2)
            return np.asarray(pooled.mean(axis=-1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a component that is scored in no case
            return self._of_means(np.nanmean(values, axis=-3))

    def gives(self, value: float) -> bool:
        """Whether the column's value is finite and follows from these scores."""
        score = float(self.score(self.values))
        return math.isfinite(value) and math.isclose(score, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    def interval(self, resamples: int) -> Interval | None:
        """Bootstrap interval over cases; cases under one edit are not independent, and are drawn together."""
        if (groups := self._groups(self.edits)) is not None:
            return bootstrap_interval(self._collapsed(self.values, groups), resamples=resamples, score=self._of_groups)
        if self.factors is not None:
            return bootstrap_interval(self.values, resamples=resamples, score=self.score)
        scored = self.values[np.isfinite(self.values[..., 0]).any(axis=1)]
        first = scored[..., 0]
        if first.size and (first == first.flat[0]).all():
            return None  # weights of a pooled mean may differ
        if self.is_pooled or first.shape[1] > 1:
            return bootstrap_interval(scored, resamples=resamples, score=self.score)
        return bootstrap_interval(first[:, 0], resamples=resamples)

    @property
    def is_share(self) -> bool:
        """Whether the score is a mean over cases that each succeed (1) or fail (0)."""
        scored = self.values[np.isfinite(self.values)]
        return self.factors is None and not self.is_pooled and bool(np.isin(scored, (0, 1)).all())

    def interval_of_equal(self) -> Interval | None:
        """Interval of a share whose cases all succeed or all fail; cases under one edit count once.

        ``None`` if they differ, or there are none.
        """
        scored = np.isfinite(self.values).any(axis=(1, 2))
        found = np.unique(self.values[np.isfinite(self.values)])
        if not self.is_share or len(found) != 1:
            return None
        groups = self._groups(self.edits)
        number = int(scored.sum()) if groups is None else len(np.unique(groups[scored]))
        return wilson_interval(int(found[0]) * number, number)

    def compared(self, other: CaseScores, resamples: int) -> Comparison | None:
        """Paired test on the cases of both runs; ``None`` if there is no such case."""
        shared = sorted(set(self.documents) & set(other.documents))
        seeds = math.lcm(self.num_seeds, other.num_seeds)
        first, second = (
            np.tile(scores.values[np.isin(scores.documents, shared)], (1, seeds // scores.num_seeds, 1))
            for scores in (self, other)
        )
        edits = [scores.edits_of(shared) for scores in (self, other)]
        if (groups := self._groups(edits[0] if any(edits[0]) else edits[1])) is not None:
            both = np.isfinite(first).any(axis=(1, 2)) & np.isfinite(second).any(axis=(1, 2))
            units = [self._collapsed(values[both], groups[both]) for values in (first, second)]
            found = compare_pairs(*units, permutations=resamples, score=self._of_groups)
            return found and found._replace(num_cases=int(both.sum()))
        if self.factors is None and not self.is_pooled:
            return compare_pairs(_over_seeds(first), _over_seeds(second), permutations=resamples)
        return compare_pairs(first, second, permutations=resamples, score=self.score)

    def edits_of(self, documents: Sequence[int]) -> tuple[str, ...]:
        """The edits of some of the documents."""
        known = dict(zip(self.documents, self.edits or [""] * len(self.documents), strict=True))
        return tuple(known[document] for document in documents)

    @staticmethod
    def _groups(edits: Sequence[str]) -> NDArray[np.int64] | None:
        """Number of each case's group, of cases under one edit; ``None`` if every case has an edit of its own."""
        names = [edit or f"case {number}" for number, edit in enumerate(edits)]
        if len(set(names)) == len(names):
            return None
        return np.unique(names, return_inverse=True)[1].astype(np.int64)

    def _collapsed(self, values: Values, groups: NDArray[np.int64]) -> Values:
        """Sums and weights of each component over the scored cases of each group: (groups, 2, seeds, components)."""
        weights = np.isfinite(values).astype(np.float64)
        sums = np.nan_to_num(values)
        if self.is_pooled:
            weights = sums[..., 1:]
            sums = sums[..., :1] * weights
        numbers = np.unique(groups[weights.any(axis=(1, 2))])
        return np.stack([[part[groups == number].sum(axis=0) for part in (sums, weights)] for number in numbers])

    def _of_groups(self, collapsed: Values) -> Values:
        """(..., groups, 2, seeds, components) -> (...): the score of the cases of these groups."""
        totals = collapsed.sum(axis=-4)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._of_means(totals[..., 0, :, :] / totals[..., 1, :, :])

    def _of_means(self, means: Values) -> Values:
        """(..., seeds, components) -> (...): mean over seeds."""
        scores = means[..., 0] if self.factors is None else edit_score(means, self.factors)
        return np.asarray(scores.mean(axis=-1))


def _over_seeds(values: Values) -> Values:
    """(cases, seeds, 1) -> (cases,): mean over the seeds with a score; NaN where no seed has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a case without a score
        return np.asarray(np.nanmean(values[..., 0], axis=1))


def combine_seeds(runs: Sequence[CaseScores]) -> CaseScores | None:
    """Runs with other seeds as one; ``None`` if their cases or components are not the same."""
    first = runs[0]
    if any(run.documents != first.documents or run.values.shape != first.values.shape for run in runs):
        return None
    if any((run.factors, run.is_pooled) != (first.factors, first.is_pooled) for run in runs):
        return None
    fewest = min(runs, key=lambda run: run.num_scored)
    values = np.concatenate([run.values for run in runs], axis=1)
    return first._replace(values=values, reasons=fewest.reasons, num_not_due=fewest.num_not_due)


def edit_score(means: Values, factors: Sequence[int]) -> Values:
    """Harmonic mean of factors, each the mean of its components; as published, of percentages with two decimals.

    See :func:`lm_eval_tasks.common.scoring.aggregation.harmonic_of_means`.

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
    """Scores of one column of a run, from its rows of :func:`lm_edit.load_cases`."""
    rows = rows.sort_values("doc_id")
    documents = tuple(int(document) for document in rows["doc_id"])
    plain = pd.to_numeric(rows["value"], errors="coerce").to_numpy(dtype=np.float64)
    saved = rows["components"].tolist() if "components" in rows else []
    composite, pooled = _components(saved), _pooled(saved)
    components, factors = composite or (plain[:, np.newaxis] if pooled is None else pooled, None)
    values = components[:, np.newaxis, :]  # of one seed
    due = rows["due"].to_numpy(dtype=bool)
    unscored = np.isnan(components).all(axis=1) & (rows["excluded"].fillna(0) == 0).to_numpy() & due
    reasons = rows["reason"][unscored].value_counts()
    return CaseScores(
        documents,
        values,
        factors,
        {str(name): int(reasons[name]) for name in sorted(reasons.index)},
        pooled is not None,
        tuple(map(str, rows["edit_key"])) if "edit_key" in rows else (),
        int((~due).sum()),
    )


def _components(saved: Sequence[object]) -> tuple[Values, tuple[int, ...]] | None:
    """(cases, components) and factors of saved edit scores ``[[ES], [GS], [LS], [RQS, RJS]]``; else ``None``."""
    shapes = {tuple(map(len, case)) for case in saved if isinstance(case, list) and _is_nested(case)}
    if len(shapes) != 1 or not all(case is None or _is_nested(case) for case in saved):
        return None
    (lengths,) = shapes
    if not (size := sum(lengths)):
        return None
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
    if not cases or any(set(case) != {"value", "weight"} or not all(map(is_number, case.values())) for case in cases):
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
