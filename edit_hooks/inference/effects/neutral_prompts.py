"""First-token divergence on neutral prompts: a cheap number for the damage that edits do.

For each of a few sentences that no benchmark edits, the next-token distributions of the unedited model P and the edited
model Q give KL(P || Q) in nats; the number is their mean. For a single edit without effect it is 0 exactly, since both
distributions come from batches of the same shape. For one of several that are measured together it is 0 up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import WRECKED_KL, Effects
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.effects.distributions import NoisyPrompt, next_token_log_probs
from edit_hooks.modeling.tokens import encode

# Few and short, so that they cost a few percent of the edit itself.
NEUTRAL_PROMPTS = ("The weather was", "She opened the", "A triangle has", "They walked to the")
EDITS_AT_ONCE = 64  # measured together: their distributions over a large vocabulary take 0.3 GB, and a copy as much


def verdict(divergence: float) -> Effects:
    """The effect that a divergence is; one that is not finite is a wreck, too."""
    return Effects(first_token_kl=divergence, wrecked=not divergence <= WRECKED_KL)


class NeutralPrompts:
    """The prompts, and the distributions of the unedited model after them.

    Args:
        model: as it is now; its distributions are those of the unedited model.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self._prompts = [NoisyPrompt(tuple(encode(tokenizer, prompt).ids)) for prompt in NEUTRAL_PROMPTS]
        (self._unedited_PV,) = self._log_probs([None])

    def divergence(self, delta: Delta | None) -> float:
        """:meth:`divergences` of one edit."""
        return self.divergences([delta])[0]

    def divergences(self, deltas: Sequence[Delta | None]) -> list[float]:
        """Mean KL(unedited || edited) in nats under each edit; NaN if the edited model's logits are not finite.

        Args:
            deltas: the edits, or the parts of them that are not in the model's weights yet. Contexts are left out,
                since they change prompts and not the model.
        """
        models = [None if delta is None else delta.without_contexts for delta in deltas]
        parts = (models[start : start + EDITS_AT_ONCE] for start in range(0, len(models), EDITS_AT_ONCE))
        return [self._divergence(log_q_PV) for part in parts for log_q_PV in self._log_probs(part)]

    def _divergence(self, log_q_PV: torch.Tensor) -> float:
        log_p_PV = self._unedited_PV
        divergence_P = (log_p_PV.exp() * (log_p_PV - log_q_PV)).sum(1, dtype=torch.float64)
        return max(0.0, float(divergence_P.mean())) if divergence_P.isfinite().all() else float("nan")

    def _log_probs(self, deltas: Sequence[Delta | None]) -> Sequence[torch.Tensor]:
        """Log-probabilities [P, V] after the prompts under each edit, on the CPU."""
        jobs = [(prompt, delta) for delta in deltas for prompt in self._prompts]
        return torch.stack(next_token_log_probs(self.model, jobs, limits_for(self.model))).split(len(self._prompts))
