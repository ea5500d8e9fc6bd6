"""Scoring primitives: pure functions of numbers and texts.

Worked examples of every function, including edge cases, are in ``tests/cases/scoring.json``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from judges.match import words


def mean_nll(logprob: float, num_tokens: int) -> float:
    """NLL: mean negative log-likelihood per target **token**.

    lm-eval's ``acc_norm`` divides by characters and ``acc_bytes`` by bytes; the editing papers use neither.
    """
    if num_tokens < 1:
        raise ValueError(f"a target needs at least one token, got {num_tokens}")
    return -logprob / num_tokens


def prefers(nll_wanted: float, nll_other: float) -> float:
    """PROB: 1 if the wanted target is strictly more likely per token.

    A tie fails in both directions.
    """
    return float(nll_wanted < nll_other)


def magnitude(nll_wanted: float, nll_other: float) -> float:
    """Difference of the per-token (geometric mean) probabilities, in -1..1."""
    return math.exp(-nll_wanted) - math.exp(-nll_other)


def share_equal(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """Share of positions with equal tokens.

    TF-MATCH if ``left`` is the teacher-forced argmax and ``right`` the target; AGREE-TF if both are argmaxes along the
    same target, of the edited and the unedited model.
    """
    if not left or len(left) != len(right):
        raise ValueError(f"two non-empty sequences of one length are needed, got lengths {len(left)} and {len(right)}")
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)


def all_equal(left: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """AGREE-GEN on the token ids of two generations: 1 if they are equal.

    Two empty ones agree.
    """
    return float(list(left) == list(right))


def first_word(text: str) -> str:
    """The first word after :func:`judges.match.normalize`, or the empty string."""
    return next(iter(words(text)), "")


def harmonic_mean(values: Sequence[float]) -> float:
    """Harmonic mean of non-negative numbers; 0 if one of them is 0."""
    if not values or min(values) < 0:
        raise ValueError(f"one or more non-negative values are needed, got {list(values)}")
    return 0.0 if min(values) == 0 else len(values) / math.fsum(1 / value for value in values)
