"""Rotary scalings under which the keys of a token depend on the length of its text.

transformers chooses the frequencies of a pass by the largest position in it: ``longrope`` has one set up to
``original_max_position_embeddings`` and another beyond, ``dynamic`` another set for every length beyond
``max_position_embeddings``. Texts that would have other frequencies alone must not share a pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from edit_hooks.modeling.architectures import input_device


class LengthRule(NamedTuple):
    """One scaling of a model; up to ``border`` tokens the keys do not depend on the length."""

    rope_type: str
    border: int

    def group(self, prompt_length: int, total_length: int) -> Hashable:
        """A value in which texts agree that may share the passes from the prompt to the last token."""
        if total_length <= self.border:
            return "up to the border"
        if self.rope_type == "longrope" and prompt_length > self.border:
            return "beyond the border"
        return prompt_length  # the rows of a batch then have the same length at every step


def length_rules(model: Any) -> list[LengthRule]:
    """The scalings of a model that depend on the length; several if its layers differ."""
    config = getattr(model, model.base_model_prefix, model).config
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in rope.values() if isinstance(entry, Mapping)]
    rules = []
    for entry in by_layer_type or [rope]:
        if entry.get("rope_type") == "longrope":
            border = entry.get("original_max_position_embeddings") or config.max_position_embeddings
            rules.append(LengthRule("longrope", int(border)))
        elif "dynamic" in str(entry.get("rope_type")):
            rules.append(LengthRule("dynamic", int(config.max_position_embeddings)))
    return rules


@torch.no_grad()
def forget_lengths(model: Any) -> None:
    """Let the next pass choose its frequencies as on a fresh model.

    A module with ``dynamic`` scaling keeps the frequencies of its longest text until a text is shorter than the border,
    so answers would depend on the texts before them. A pass of one token resets it.
    """
    if not any(rule.rope_type == "dynamic" for rule in length_rules(model)):
        return
    grown = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    for module in grown:  # transformers up to 5.12 does not record here that the frequencies have grown
        module.max_seq_len_cached = module.original_max_seq_len + 1
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
    for module in grown:
        module.max_seq_len_cached = module.original_max_seq_len
