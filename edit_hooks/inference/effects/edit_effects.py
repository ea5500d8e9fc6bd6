"""Numbers that every edit reports about its effect, whatever its editor: damage elsewhere, and the target's gain.

An optimization that ended well says nothing about the edit: what is written can be a small part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import Effects
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.effects.neutral_prompts import NeutralPrompts, verdict
from edit_hooks.inference.items import ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.request import EditRequest
from edit_hooks.utils.progress import Progress


class EditEffects:
    """Measures edits of one model.

    Args:
        model: as it is now; its distributions on neutral prompts are those of the unedited model.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._neutral = NeutralPrompts(model, tokenizer)

    def divergence(self, delta: Delta | None) -> float:
        """Mean KL(unedited || edited) in nats of the next token after neutral prompts.

        Args:
            delta: the edit, or the part of it that is not in the model's weights yet.
        """
        return self._neutral.divergence(delta)

    def target_nlls(
        self, requests: Sequence[EditRequest], *deltas: Delta | None, progress: Progress = lambda count: None
    ) -> list[dict[str, float]]:
        """Negative log-likelihoods of the requests' targets after their prompts, under each of several edits.

        Args:
            deltas: as in :meth:`divergence`. Contexts are left out: they change prompts and not the model.

        Returns:
            For each edit: request key -> mean over the target's tokens in nats; NaN if a logit is not finite.
        """
        return self._nlls([(delta, requests) for delta in deltas], progress)

    def _nlls(
        self, edits: Sequence[tuple[Delta | None, Sequence[EditRequest]]], progress: Progress = lambda count: None
    ) -> list[dict[str, float]]:
        """As :meth:`target_nlls`, with requests for each edit, in the same batches."""
        models = [(None if delta is None else delta.without_contexts, requests) for delta, requests in edits]
        jobs = [(self._item(request), model) for model, requests in models for request in requests]
        scored = iter(score(self.model, jobs, limits_for(self.model), progress))
        lengths = iter([len(item.continuation) for item, _ in jobs])
        return [{one.key: -next(scored).logprob / next(lengths) for one in requests} for _, requests in edits]

    def _item(self, request: EditRequest) -> ScoreItem:
        context, target = split_continuation(self.tokenizer, request.text, request.continuation)
        return ScoreItem(tuple(context), tuple(target))

    def of_independent(self, edits: Sequence[tuple[Delta, Sequence[EditRequest]]]) -> list[Effects]:
        """All numbers of edits of the model as it is now, each with the requests that it has written."""
        divergences = self._neutral.divergences([delta for delta, _ in edits])
        nlls = self._nlls([*((None, requests) for _, requests in edits), *edits])
        before, after = nlls[: len(edits)], nlls[len(edits) :]
        return [
            with_nlls(verdict(divergence), requests, *pair)
            for divergence, (_, requests), *pair in zip(divergences, edits, before, after, strict=True)
        ]

    def of_step(
        self, runtime_part: Delta | None, requests: Sequence[EditRequest], before: Mapping[str, float]
    ) -> Effects:
        """All numbers of a step that is in the model now.

        Args:
            runtime_part: the edits so far that are not in the weights.
            before: by request key, negative log-likelihoods before the step.
        """
        (after,) = self.target_nlls(requests, runtime_part)
        return with_nlls(verdict(self.divergence(runtime_part)), requests, before, after)


def with_nlls(
    effects: Effects, requests: Sequence[EditRequest], before: Mapping[str, float], after: Mapping[str, float]
) -> Effects:
    """Add means over requests before and after an edit of them, and the pairs of several; without a request nothing.

    Args:
        before, after: request key -> negative log-likelihood.
    """
    if not requests:
        return effects
    pairs = tuple((before[request.key], after[request.key]) for request in requests)
    mean_before, mean_after = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return replace(
        effects,
        target_nll_before=mean_before,
        target_nll_after=mean_after,
        target_nlls=pairs if len(pairs) > 1 else (),
    )
