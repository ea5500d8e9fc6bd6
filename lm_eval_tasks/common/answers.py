"""One small typed form for what a model answered, whichever model class it was.

`edited_hf` answers with mappings that carry token ids, the unedited model's answer and edit diagnostics. lm-eval's own
models answer ``(log-likelihood, is_greedy)`` or a text that is cut already. Both are read here; what a stock answer
does not hold is ``None`` and whatever needs it stays unscored, with :data:`NEEDS_EDITED_HF` as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from judges.base import Verdict
from lm_eval_tasks.common.scoring import truncate

NEEDS_EDITED_HF = (
    "this model class does not report {what}; run with --model edited_hf "
    "(--model_args mode=none,... for an unedited model)"
)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Answer to a ``loglikelihood`` request; token fields have one entry per target token."""

    logprob: float
    is_greedy: bool
    num_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    token_argmax: tuple[int, ...] | None = None
    unedited: Likelihood | None = None

    def __str__(self) -> str:
        return f"logprob={self.logprob:.6g} tokens={self.num_tokens} greedy={self.is_greedy}"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Answer to a ``generate_until`` request: ``text`` is cut at the task's stop strings, ``raw`` is as it came."""

    text: str
    raw: str
    token_ids: tuple[int, ...] | None = None
    stop: str | None = None
    unedited: Generation | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Failed:
    """No usable answer: the edit failed, or the model returned something else than promised."""

    reason: str

    def __str__(self) -> str:
        return f"[unscored: {self.reason}]"


Answer: TypeAlias = Likelihood | Generation | Failed | Verdict


def read_answer(raw: Any, stops: Iterable[str] = ()) -> Answer:
    """Read one response of a model.

    Args:
        raw: a mapping of `edited_hf`, a stock ``(logprob, is_greedy)`` pair (as a list too: caches store JSON), a stock
            text, or an answer that is in typed form already.
        stops: stop strings of the task, applied to generated texts.
    """
    if isinstance(raw, (Likelihood, Generation, Failed, Verdict)):
        return raw
    stops = tuple(stops)
    if isinstance(raw, str):
        return Generation(text=truncate(raw, stops), raw=raw)
    if isinstance(raw, Mapping):
        return _read_mapping(raw, stops)
    if isinstance(raw, Sequence) and len(raw) == 2:
        return Likelihood(logprob=float(raw[0]), is_greedy=bool(raw[1]))
    return Failed(f"unreadable answer of type {type(raw).__name__}")


def _read_mapping(raw: Mapping[str, Any], stops: tuple[str, ...]) -> Answer:
    if error := raw.get("error"):
        return Failed(f"edit failed: {error}")
    try:
        unedited = None if raw.get("unedited") is None else _read_mapping(raw["unedited"], stops)
        if isinstance(unedited, Failed):
            return unedited
        if "logprob" in raw:
            return _likelihood(raw, unedited)
        return Generation(
            text=truncate(raw["text"], stops),
            raw=raw["text"],
            token_ids=tuple(raw["token_ids"]),
            stop=raw.get("stop"),
            unedited=unedited if isinstance(unedited, Generation) else None,
        )
    except KeyError as missing:
        return Failed(f"answer without the field {missing}")


def _likelihood(raw: Mapping[str, Any], unedited: Answer | None) -> Likelihood | Failed:
    token_ids, token_argmax = tuple(raw["token_ids"]), tuple(raw["token_argmax"])
    num_tokens = int(raw["num_tokens"])
    if not num_tokens == len(token_ids) == len(token_argmax) or num_tokens < 1:
        return Failed(f"answer with {num_tokens} tokens, {len(token_ids)} ids and {len(token_argmax)} argmaxes")
    return Likelihood(
        logprob=float(raw["logprob"]),
        is_greedy=bool(raw["is_greedy"]),
        num_tokens=num_tokens,
        token_ids=token_ids,
        token_argmax=token_argmax,
        unedited=unedited if isinstance(unedited, Likelihood) else None,
    )
