"""Questions as token ids, and limits of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from edit_hooks.answers import ScoredContinuation
from edit_hooks.decoding import Sampling, TokenPrompts
from edit_hooks.state_reading import State


@final
@dataclass(frozen=True)
class TokenContexts:
    """A context of its own for every token of a continuation.

    Attributes:
        rule: how the gold tokens were put after the question.
        ids: token ids of each context.
    """

    rule: TokenPrompts
    ids: tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class ScoreItem:
    """A continuation to be scored after a context.

    Attributes:
        context, continuation: token ids.
        texts: context and continuation as text; context edits rebuild the item from them.
        by_token: contexts of the single tokens; ``None``: each token follows ``context`` and the tokens before it.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    texts: tuple[str, str] | None = None
    by_token: TokenContexts | None = None

    @property
    def parts(self) -> list[ScoreItem]:
        """The items of one forward pass each."""
        if self.by_token is None:
            return [self]
        return [
            ScoreItem(context, (token,)) for context, token in zip(self.by_token.ids, self.continuation, strict=True)
        ]

    def answer(self, token_logprobs: Sequence[float], token_argmax: Sequence[int]) -> ScoredContinuation:
        """Create the answer from log-probability and argmax at each token."""
        return ScoredContinuation(
            logprob=sum(token_logprobs),
            is_greedy=list(token_argmax) == list(self.continuation),
            token_ids=self.continuation,
            token_logprobs=tuple(token_logprobs),
            token_argmax=tuple(token_argmax),
        )


@final
@dataclass(frozen=True)
class GenerateItem:
    """A context to be continued.

    Attributes:
        context: token ids.
        stops: strings that end the continuation, besides the end tokens.
        max_new_tokens: longest continuation, or longest answer after a thought if ``max_thought_tokens`` is given.
        text: the context as text; context edits rebuild the item from it.
        think_end: token id or text that ends a thought; stop strings count after the last one only.
        max_thought_tokens: longest thought; ``None``: thought and answer share ``max_new_tokens``.
        ignore_end: end tokens do not end the continuation.
        sampling: how tokens are drawn; ``None``: greedily.
        with_prompt: decode the text together with the context; some tokenizers drop the first space of a text.
        target: the tokens that fix the length of the continuation; ``None`` if nothing does.
        forced: the model reads the tokens of ``target`` in place of those it continues with (teacher forcing).
    """

    context: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int
    text: str | None = None
    think_end: int | str | None = None
    max_thought_tokens: int | None = None
    ignore_end: bool = False
    sampling: Sampling | None = None
    with_prompt: bool = False
    target: tuple[int, ...] | None = None
    forced: bool = False

    def token_read(self, tokens: Sequence[int]) -> int:
        """The token that the model reads after it has produced ``tokens``."""
        return self.target[len(tokens) - 1] if self.forced and self.target else tokens[-1]

    @property
    def most_tokens(self) -> int:
        """Largest number of new tokens, a thought included."""
        return self.max_new_tokens + (self.max_thought_tokens or 0)


@final
@dataclass(frozen=True)
class TokenNoise:
    """Gaussian noise on the input embeddings of some tokens.

    Attributes:
        positions: the perturbed tokens.
        sigma: standard deviation, absolute.
        seed: text that seeds the draw.
    """

    positions: tuple[int, ...]
    sigma: float
    seed: str


@final
@dataclass(frozen=True)
class StateItem:
    """A prompt whose hidden state at the last token is compared with the unedited model's.

    Attributes:
        context: token ids.
        state: the layer.
        noise: perturbation of the embeddings, if any.
    """

    context: tuple[int, ...]
    state: State
    noise: TokenNoise | None = None


Item: TypeAlias = ScoreItem | GenerateItem | StateItem


@dataclass(frozen=True)
class Limits:
    """Bounds of one forward pass.

    Attributes:
        max_tokens: tokens, padding included.
        max_rows: rows.
    """

    max_tokens: int = 4096
    max_rows: int = 256
