"""Scores of labeled answers over the rows of an EditGLUE task."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval.api.registry import register_aggregation

INVALID = -1  # class of an answer that names no label

# (right class, answered class) of a row; None for an answer that could not be read at all
Labeled = tuple[int, int | None]


def weighted_f1(rows: Sequence[Labeled]) -> float | None:
    """F1 of each class that occurs among the right ones, averaged with their numbers of rows as weights.

    :data:`INVALID` is a class of its own that is never right, so such an answer is a miss of its row's class. ``None``
    if a row has no answer.
    """
    from sklearn.metrics import f1_score

    if any(answer is None for _, answer in rows):
        return None
    gold, answers = zip(*rows, strict=True)
    return float(f1_score(gold, answers, average="weighted", zero_division=0))


def matthews(rows: Sequence[Labeled]) -> float | None:
    """Matthews correlation of right and answered class, with :data:`INVALID` as a class; 0 for a constant answer."""
    from sklearn.metrics import matthews_corrcoef

    if any(answer is None for _, answer in rows):
        return None
    gold, answers = zip(*rows, strict=True)
    return float(matthews_corrcoef(gold, answers))


register_aggregation("weighted_f1")(weighted_f1)
register_aggregation("matthews")(matthews)
