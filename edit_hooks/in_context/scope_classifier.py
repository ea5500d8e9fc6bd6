"""SERAC's scope classifier: an encoder that scores how likely a question is in the scope of a fact.

Mitchell et al., "Memory-Based Model Editing at Scale", section 3.2 and the release: the score is
``exp(-||e_fact - e_question||^2)`` of the encoder's vectors (the released embedding variant, one head, scale 1). A
question is in scope if its best score is above :data:`THRESHOLD`.

Shapes: N facts, M questions, T tokens, E width of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import warn_of_english_rule

log = get_logger("lm_eval.edited_hf")

THRESHOLD = 0.5  # of the release
MAX_TOKENS = 512  # of the release

Pooling = Literal["cls", "unit_mean"]
ScopeTexts = Literal["prompts", "released"]


class ScopeClassifier(nn.Module):
    """Vectors of texts by an encoder.

    Args:
        pooling: cls: the state of the first token (the release); unit_mean: the mean of the token states, at length 1.
        separator: the token that ends a fact with ``scope_texts: released``.
    """

    def __init__(self, encoder: PreTrainedModel, tokenizer: Tokenizer, pooling: Pooling, separator: str) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.pooling, self.separator = encoder, tokenizer, pooling, separator
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # its output is not read
        tokenizer.no_padding()
        positions = getattr(encoder.config, "max_position_embeddings", None)
        tokenizer.enable_truncation(min(MAX_TOKENS, positions or MAX_TOKENS))

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors [N, E] of texts, with gradients if they are enabled."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        ids_NT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        mask_NT = torch.zeros_like(ids_NT)
        for index, row in enumerate(rows):
            ids_NT[index, : len(row)], mask_NT[index, : len(row)] = torch.tensor(row), 1
        ids_NT, mask_NT = ids_NT.to(self.device), mask_NT.to(self.device)
        states_NTE: torch.Tensor = self.encoder(input_ids=ids_NT, attention_mask=mask_NT).last_hidden_state
        if self.pooling == "cls":
            return states_NTE[:, 0]
        mean_NE = (states_NTE * mask_NT[:, :, None]).sum(1) / mask_NT.sum(1, keepdim=True)
        return nn.functional.normalize(mean_NE, dim=1)

    @torch.no_grad()
    def one_by_one(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors [N, E] that do not depend on the other texts, not even in the last bit."""
        return torch.cat([self([text]) for text in texts])


def scope_scores(facts_NE: torch.Tensor, questions_ME: torch.Tensor) -> torch.Tensor:
    """Scores [M, N] in (0, 1], differentiable."""
    return (-(questions_ME[:, None] - facts_NE[None]).square().sum(2)).exp()


def fact_text(texts: ScopeTexts, prompt: str, statement: str, separator: str) -> str:
    """The text of a fact that the classifier reads.

    ``released``: the fact without its last word, which cuts one word of the target whatever its length, and a separator
    token. A text without spaces is not cut. ``prompts``: the prompt alone.

    Args:
        statement: the prompt with its target.
    """
    if texts == "prompts":
        return prompt
    remedy = "It cuts the last word, and a text without spaces has none: scope_texts: prompts."
    warn_of_english_rule(log, "scope_texts: released", [] if " " in statement else [statement], remedy)
    return statement.rsplit(" ", 1)[0] + separator
