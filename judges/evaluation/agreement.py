"""Agreement of two judges on the same answers, corrected for chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from judges.base import CORRECT, INCORRECT, LABELS, Verdict


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
    return Agreement(len(both), len(labels) - len(both), counts, share, _kappa(counts, share), disagreements)


def _kappa(counts: dict[tuple[str, str], int], share: float | None) -> float | None:
    if share is None:
        return None
    total = sum(counts.values())
    by_chance = sum(
        (counts[label, CORRECT] + counts[label, INCORRECT]) * (counts[CORRECT, label] + counts[INCORRECT, label])
        for label in LABELS
    ) / (total * total)
    return None if by_chance == 1 else (share - by_chance) / (1 - by_chance)
