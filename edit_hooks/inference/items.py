"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Progress = Callable[[int], None]


@dataclass(frozen=True)
class ScoreItem:
    """A continuation to be scored after a context, as token ids.

    Attributes:
        texts: context and continuation as texts, from which edits that change prompts build the item again.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    texts: tuple[str, str] | None = None

    def record(self, token_logprobs: list[float], token_argmax: list[int]) -> dict[str, Any]:
        """The answer to this item, from what the model says at each position of the continuation."""
        return {
            "logprob": sum(token_logprobs),
            "is_greedy": token_argmax == list(self.continuation),
            "num_tokens": len(self.continuation),
            "token_logprobs": token_logprobs,
            "token_argmax": token_argmax,
            "token_ids": list(self.continuation),
        }


@dataclass(frozen=True)
class GenerateItem:
    """A context to be continued greedily until a stop string, an end token or ``max_new_tokens``.

    Attributes:
        text: the context as text, from which edits that change prompts build the item again.
    """

    context: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int
    text: str | None = None


@dataclass(frozen=True)
class Limits:
    """How much is computed at once.

    Attributes:
        max_tokens: tokens (padding included) of one forward pass.
        max_rows: rows of one batch.
    """

    max_tokens: int = 4096
    max_rows: int = 256
