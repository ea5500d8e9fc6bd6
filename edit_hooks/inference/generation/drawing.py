"""Seeded draws of tokens: temperature, top-k, top-p.

A draw depends on its question's seed, the number of the draw, the prompt and the position, and on nothing else: neither
on the other rows of the batch nor on the order of the questions. Every row has a generator of its own, takes one
uniform number per token, and looks it up in the cumulative distribution in float64 on the CPU. Shapes: N rows, V
vocabulary.
"""

from __future__ import annotations

import torch

from edit_hooks.decoding import Sampling
from edit_hooks.inference.items import GenerateItem
from edit_hooks.utils.storage.hashing import key_of


class TokenDraw:
    """The draws of one question.

    Args:
        item: a question with ``sampling``.
    """

    def __init__(self, item: GenerateItem) -> None:
        assert item.sampling is not None
        self.sampling = item.sampling
        parts = {"seed": self.sampling.seed, "draw": self.sampling.draw, "prompt": list(item.context)}
        self._generator = torch.Generator().manual_seed(int(key_of(parts)[:15], 16))

    def token(self, logits_V: torch.Tensor) -> int:
        """The next token."""
        probabilities, tokens = distribution(logits_V, self.sampling)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        cumulative = probabilities.cumsum(0)
        index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
        return int(tokens[min(index, len(tokens) - 1)])


def distribution(logits_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities from which a token is drawn, largest first, and their tokens.

    As in transformers: top-k keeps all tokens whose logit equals the k-th largest, so there may be more than k; top-p
    is taken of what top-k has kept, and keeps the token that crosses the bound. Logits of a broken model, of which the
    largest is not finite, have no distribution: the greedy token is certain.
    """
    logits_V = logits_V.detach().to("cpu", torch.float64) / sampling.temperature
    if not logits_V.max().isfinite():
        return torch.ones(1, dtype=torch.float64), logits_V.argmax()[None]
    count = min(sampling.top_k or len(logits_V), len(logits_V))
    (candidates,) = (logits_V >= logits_V.topk(count).values[-1]).nonzero(as_tuple=True)
    values, order = logits_V[candidates].sort(descending=True, stable=True)
    tokens, probabilities = candidates[order], values.softmax(0)
    if sampling.top_p is not None and sampling.top_p < 1:
        not_larger = probabilities.flip(0).cumsum(0).flip(0)  # of this token and all after it
        kept = not_larger > 1 - sampling.top_p
        kept[0] = True
        probabilities, tokens = probabilities[kept] / probabilities[kept].sum(), tokens[kept]
    return probabilities, tokens
