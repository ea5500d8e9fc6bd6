"""Scoring of continuations whose tokens have contexts of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edit_hooks.answers import ScoredContinuation
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import ScoreItem


def score_parts(
    jobs: Sequence[tuple[ScoreItem, Delta | None]],
    score: Callable[[Sequence[tuple[ScoreItem, Delta | None]]], Sequence[ScoredContinuation]],
) -> list[ScoredContinuation]:
    """Score items with any number of parts.

    Args:
        score: scores items of one part, in order.

    Returns:
        One answer per item; that of several parts has log-probability and argmax of each token after its own context.
    """
    answers = iter(score([(part, delta) for item, delta in jobs for part in item.parts]))
    merged = []
    for item, _ in jobs:
        own = [next(answers) for _ in item.parts]
        if item.by_token is None:
            merged += own
            continue
        logprobs = [number for answer in own for number in answer.token_logprobs or ()]
        merged.append(item.answer(logprobs, [token for answer in own for token in answer.token_argmax or ()]))
    return merged
