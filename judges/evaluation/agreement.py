"""Agreement of two judges on the same answers, corrected for chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from judges.base import CORRECT, INCORRECT, LABELS, Verdict

LEVEL = 0.95  # of intervals
NUM_DRAWS = 20_000


class Agreement(NamedTuple):
    """Agreement over the answers that both judges scored.

    Args:
        num_both: answers with a label from both judges.
        num_unscored: answers without a label from either judge or both.
        counts: (label of the first, label of the second) -> number of answers.
        share: share of ``num_both`` with equal labels; ``None`` if ``num_both`` is 0.
        kappa: Cohen's kappa (Cohen 1960, eq. 1); ``None`` where undefined: both judges give a single, equal label.
        disagreements: indices of the answers with different labels.
    """

    num_both: int
    num_unscored: int
    counts: dict[tuple[str, str], int]
    share: float | None
    kappa: float | None
    disagreements: list[int]


def compare_verdicts(first: Sequence[Verdict], second: Sequence[Verdict]) -> Agreement:
    """Compare the verdicts of two judges on the same answers, in the same order."""
    labels = [(a.label, b.label) for a, b in zip(first, second, strict=True)]
    both = [(a, b) for a, b in labels if a is not None and b is not None]
    counts = {(a, b): both.count((a, b)) for a in LABELS for b in LABELS}
    disagreements = [n for n, (a, b) in enumerate(labels) if a is not None and b is not None and a != b]
    share = (len(both) - len(disagreements)) / len(both) if both else None
    return Agreement(len(both), len(labels) - len(both), counts, share, compute_kappa(counts), disagreements)


def compute_kappa(counts: Mapping[tuple[str, str], int]) -> float | None:
    """Cohen's kappa of two judges from :attr:`Agreement.counts`; ``None`` where undefined."""
    total = sum(counts.values())
    if not total:
        return None
    share = sum(counts[label, label] for label in LABELS) / total
    by_chance = sum(
        (counts[label, CORRECT] + counts[label, INCORRECT]) * (counts[CORRECT, label] + counts[INCORRECT, label])
        for label in LABELS
    ) / (total * total)
    return None if by_chance == 1 else (share - by_chance) / (1 - by_chance)


def kappa_interval(counts: Mapping[tuple[str, str], int]) -> tuple[float, float] | None:
    """The central 95% interval of kappa; ``None`` where kappa is undefined.

    The four shares are drawn from their posterior under Jeffreys' prior. A bootstrap of the counts agrees with it for
    many answers, but gives full agreement an interval of no width, however few the answers.
    """
    kappa = compute_kappa(counts)
    if kappa is None:
        return None
    import numpy as np

    cells = [(first, second) for first in LABELS for second in LABELS]
    shares_D4 = np.random.default_rng(0).dirichlet([counts[cell] + 0.5 for cell in cells], size=NUM_DRAWS)
    shares_D22 = shares_D4.reshape(-1, len(LABELS), len(LABELS))
    agreed_D = shares_D22.trace(axis1=1, axis2=2)
    by_chance_D = (shares_D22.sum(axis=2) * shares_D22.sum(axis=1)).sum(axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile((agreed_D - by_chance_D) / (1 - by_chance_D), [tail, 1 - tail])
    return min(float(low), kappa), max(float(high), kappa)
