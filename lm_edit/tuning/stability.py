"""Stability: how far an edit leaves the answers near its prompt as they were.

"Near" is an edit prompt whose input embeddings carry Gaussian noise on the tokens of the subject, of the relation or of
all of it: a virtual fact close to the edited one ("Beyond Local Edits: Embedding-Virtualized
Knowledge ..."). With p the unedited model's next-token distribution after such an instance and q the edited model's,

    drift = KL(p || q) in nats,    stability = mean over a fact's instances of exp(-drift), in 0..1;

1 is an edit without any effect there, and exp(-drift) of a drift of 0.7 nats is a half. p and q are compared on the 100
tokens that p finds likeliest, and all others as one. Every candidate of a search meets the same instances: they depend
on the seed and the request, and noise is as large as the unedited model needs. It is 1, 2 or 4 standard deviations of
the embeddings, the least at which the answer to the instance differs from that to the prompt itself: at an instance
that *is* the edit prompt, stability would ask to keep the old answer. An instance that coincides at every size is left
out.

Shapes: T tokens, P perturbed tokens, d embedding width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.effects.distributions import NoisyPrompt, next_token_log_probs
from edit_hooks.modeling.forward.embedding_noise import drift_positions, gaussian_noise, noise_at
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest

INSTANCES_PER_KIND = 2  # of each kind of drift: subject, relation, all
NOISE_RATIOS = (1.0, 2.0, 4.0)  # standard deviations of the embeddings
NUM_COMPARED = 100  # tokens
# Nats. Below it the instance is the prompt to the model: it predicts the same token with nearly the same probability.
MIN_DISTANCE = 0.05


class VirtualInstance(NamedTuple):
    """A virtual instance and the unedited model's log-probabilities [V] after it."""

    prompt: NoisyPrompt
    log_probs_V: torch.Tensor


class NearbyPrompts:
    """The virtual instances of edit prompts, drawn once for all candidates of a search."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self._instances: dict[str, list[VirtualInstance]] = {}
        self._width, self._std = _embedding_scale(model)

    def stabilities(self, requests: Sequence[EditRequest], deltas: Sequence[Delta | None]) -> list[float | None]:
        """The stability of every request under its edit; ``None`` if all its instances coincide with the prompt."""
        instances = [self._of(request) for request in requests]
        jobs = [(one.prompt, delta) for group, delta in zip(instances, deltas, strict=True) for one in group]
        edited = iter(next_token_log_probs(self.model, jobs, limits_for(self.model)))
        return [
            math.fsum(math.exp(-_divergence(one.log_probs_V, next(edited))) for one in group) / len(group)
            if group
            else None
            for group in instances
        ]

    def _of(self, request: EditRequest) -> list[VirtualInstance]:
        if request.key not in self._instances:
            self._instances[request.key] = self._draw(request)
        return self._instances[request.key]

    def _draw(self, request: EditRequest) -> list[VirtualInstance]:
        encoding = encode(self.tokenizer, request.text)
        ids = tuple(encoding.ids)
        if request.subject_span is None:
            positions = [list(range(len(ids)))]
        else:
            positions = [found for found in drift_positions(encoding, request.subject_span).values() if found]
        digest = hashlib.sha256(f"{self.seed} {request.text}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        noises = [
            noise_at(where, len(ids), gaussian_noise((len(where), self._width), self._std, generator))
            for where in positions
            for _ in range(INSTANCES_PER_KIND)
        ]
        sizes: list[list[NoisyPrompt]] = [
            [NoisyPrompt(ids, ratio * noise) for ratio in NOISE_RATIOS] for noise in noises
        ]
        prompts = [NoisyPrompt(ids), *(prompt for group in sizes for prompt in group)]
        at_prompt_V, *rest = next_token_log_probs(
            self.model, [(prompt, None) for prompt in prompts], limits_for(self.model)
        )
        answers = iter(rest)
        instances = []
        for group in sizes:
            candidates = [VirtualInstance(prompt, next(answers)) for prompt in group]
            far = [one for one in candidates if _divergence(at_prompt_V, one.log_probs_V) >= MIN_DISTANCE]
            instances += far[:1]
        return instances


@torch.no_grad()
def _embedding_scale(model: Any) -> tuple[int, float]:
    """Width of the input embeddings and the standard deviation of their entries, as the model passes them on."""
    embedding = model.get_input_embeddings()
    count = min(1024, embedding.weight.shape[0])
    sample = at_least_float32(embedding(torch.arange(count, device=embedding.weight.device)))
    return sample.shape[-1], float(sample.std())


def _divergence(before_V: torch.Tensor, after_V: torch.Tensor) -> float:
    """KL(before || after) in nats, with all but the likeliest tokens of ``before`` as one.

    Infinite for a model whose logits are no longer finite.
    """
    if not torch.isfinite(after_V).all():
        return math.inf
    top = before_V.topk(min(NUM_COMPARED, len(before_V))).indices
    before, after = before_V[top].double(), after_V[top].double()
    kept_before, kept_after = float(before.exp().sum()), float(after.exp().sum())
    kl = float((before.exp() * (before - after)).sum())
    rest_before, rest_after = max(1 - kept_before, 0.0), max(1 - kept_after, 1e-12)
    if len(top) < len(before_V) and rest_before > 1e-12:
        kl += rest_before * math.log(rest_before / rest_after)
    return max(kl, 0.0)
