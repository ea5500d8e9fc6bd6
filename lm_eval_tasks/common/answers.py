"""Answers of any lm-eval model class in the typed form of :mod:`edit_hooks.answers`.

lm-eval's own model classes answer ``(log-likelihood, is_greedy)`` or a text. Fields that such an answer lacks are
``None``; a metric that needs them stays unscored, with :data:`NEEDS_EDITED_HF` as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText, ScoredContinuation
from judges.base import Verdict

NEEDS_EDITED_HF = (
    "this model class does not report {what}; run with --model edited_hf "
    "(--model_args mode=none,... for an unedited model)"
)

Answer: TypeAlias = ScoredContinuation | GeneratedText | FailedAnswer | Verdict


def read_answer(raw: Any, stops: Iterable[str] = ()) -> Answer:
    """One response of a model as a typed answer.

    Args:
        raw: an answer of `edited_hf` (of which the final one is read), a typed answer, a stock ``(logprob, is_greedy)``
            pair (or a list of two, as caches store it), or a stock text.
        stops: stop strings of the task, applied to generated texts.
    """
    if isinstance(raw, EditedAnswer):
        raw = raw.final
    if isinstance(raw, GeneratedText):
        return raw.until(stops)
    if isinstance(raw, (ScoredContinuation, FailedAnswer, Verdict)):
        return raw
    if isinstance(raw, str):
        return GeneratedText(raw=raw, stops=tuple(stops))
    if isinstance(raw, Sequence) and len(raw) == 2:
        return ScoredContinuation(logprob=float(raw[0]), is_greedy=bool(raw[1]))
    return FailedAnswer(f"unreadable answer of type {type(raw).__name__}")
