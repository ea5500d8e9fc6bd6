"""Scores of single cases, and how a column's value follows from them: a mean, a pooled mean, or an edit score."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from edit_hooks.utils.text.readable import readable
from lm_edit.results.statistics.intervals import RESAMPLES, Interval, Values, bootstrap_interval, wilson_interval
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

    def gives(self, value: float) -> bool:
        """Whether the column's value is finite and follows from these scores."""
        score = float(self.of_sums(self.units().sum(axis=0)))
        return math.isfinite(value) and math.isclose(score, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    def interval(self, *, is_share: bool, resamples: int = RESAMPLES) -> Interval | None:
        """The 95% interval over cases: Wilson's for successes and failures, otherwise that of the bootstrap.

        Cases under one edit are not independent: they are drawn together, and of a share whose cases all score the
        same, as in 64 of 64, they count once. A case has one draw for its scores under all seeds.

        Args:
            is_share: the score is declared as a mean share. A count or a difference can be 0 in all cases, too.

        Returns:
            ``None`` for fewer than two cases without Wilson's interval, and if they all score the same.
        """
        units, first = self.units(), self.values[..., 0]
        found = np.unique(first[np.isfinite(first)])
        is_alone = self.groups is None and self.num_seeds == 1
        if is_share and self._is_of_successes and (len(found) == 1 or is_alone):
            number = len(units)
            return wilson_interval(number * int(found[0]) if len(found) == 1 else int(np.nansum(first)), number)
        if self.factors is None and len(found) == 1:
            return None  # weights of a pooled mean may differ
        return bootstrap_interval(units, self.of_sums, resamples=resamples)

    @property
    def _is_of_successes(self) -> bool:
        """Whether the score is a mean over cases that each succeed (1) or fail (0); false without a scored case."""
        scored = self.values[np.isfinite(self.values)]
        return bool(self.factors is None and not self.is_pooled and scored.size and np.isin(scored, (0, 1)).all())

    def edits_of(self, documents: Sequence[int]) -> tuple[str, ...]:
        """The edits of some of the documents."""
        known = dict(zip(self.documents, self.edits or [""] * len(self.documents), strict=True))
        return tuple(known[document] for document in documents)

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """Number of each case's group, of cases under one edit; ``None`` if every case has an edit of its own."""
        return _groups_of(self.edits)

    def _parts(self) -> Values:
        """What each case adds to the sums and weights of each component: (cases, 2, seeds, components)."""
        weights = np.isfinite(self.values).astype(np.float64)
        sums = np.where(weights, self.values, 0.0)
        if self.is_pooled:
            weights = sums[..., 1:]
            sums = sums[..., :1] * weights
        return np.stack([sums, weights], axis=1)

    @property
    def scored(self) -> NDArray[np.bool_]:
        """(cases,) whether a case counts in the score."""
        return np.asarray(self._parts()[:, 1].any(axis=(1, 2)))

    def units(self) -> Values:
        """Sums and weights of each component over what is drawn together: (groups, 2, seeds, components).

        Cases under one edit are a group, others one each. A group without a scored case is left out.
        """
        parts, scored = self._parts(), self.scored
        if (groups := self.groups) is None:
            return parts[scored]
        _, numbers = np.unique(groups[scored], return_inverse=True)
        units = np.zeros((int(numbers.max(initial=-1)) + 1, *parts.shape[1:]))
        np.add.at(units, numbers, parts[scored])
        return units

    def of_cases(self, chosen: NDArray[np.bool_], num_seeds: int, edits: tuple[str, ...]) -> CaseScores:
        """The scores of some cases, under these edits, with the seeds repeated up to a number."""
        values = np.tile(self.values[chosen], (1, num_seeds // self.num_seeds, 1))
        documents = tuple(np.asarray(self.documents)[chosen].tolist())
        return self._replace(documents=documents, values=values, edits=edits)

    def of_sums(self, sums: Values) -> Values:
        """(..., 2, seeds, components) -> (...): the score of cases with these sums and weights."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._of_means(sums[..., 0, :, :] / sums[..., 1, :, :])

    def _of_means(self, means: Values) -> Values:
        """(..., seeds, components) -> (...): mean over seeds."""
        scores = means[..., 0] if self.factors is None else edit_score(means, self.factors)
        return np.asarray(scores.mean(axis=-1))


# A column is tested against every other one, and its cases have one set of edits in all of these.
@functools.lru_cache(maxsize=256)
def _groups_of(edits: tuple[str, ...]) -> NDArray[np.int64] | None:
    names = [edit or f"case {number}" for number, edit in enumerate(edits)]
    if len(set(names)) == len(names):
        return None
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


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
