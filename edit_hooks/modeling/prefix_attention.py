"""Attention over a kept prefix and a few new tokens, without joining their keys and values.

Joined, the keys and values of a row would be copied, repeated for every query head and kept for the backward pass in
each block; apart, the prefix is read where it lies and never differentiated. The same numbers as the model's own
attention, up to rounding: scores over the prefix and over the new tokens are joined before the softmax.

Shapes: r rows, H query heads in G key heads, S new tokens, P prefix columns, C = P + S, K head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from edit_hooks.modeling.architectures import decoder_of
from edit_hooks.modeling.prefix_cache import Entry
from edit_hooks.modeling.tensors import at_least_float32

NAME = "kept_prefix"


_kept: list[Sequence[Entry]] = []  # what the attention reads, innermost last


class _PrefixLayer(DynamicLayer):
    """Says how long the prefix is and hands on the new keys and values alone."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.keys, self.values = entry
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Entry:
        return key_states, value_states


def _attention(
    module: Any,
    query_rHSK: torch.Tensor,
    key_rGSK: torch.Tensor,
    value_rGSK: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, with the prefix of the block from `kept_prefix`."""
    before_keys, before_values = _kept[-1][module.layer_idx]
    rows, _, new, width = query_rHSK.shape
    groups, known = key_rGSK.shape[1], before_keys.shape[2]
    # Query heads that share a key head stand side by side, so they are further queries of it.
    query = query_rHSK.reshape(rows, groups, -1, width)
    scores = torch.cat([query @ before_keys.transpose(2, 3), query @ key_rGSK.transpose(2, 3)], 3)
    scores = scores * (scaling if scaling is not None else width**-0.5)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = at_least_float32(scores.view(rows, groups, -1, new, known + new))
    # Not -inf: padding far behind a row may see nothing in a sliding window, and nobody reads it.
    scores = scores.masked_fill(~attention_mask[:, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(query.dtype).view(rows, groups, -1, known + new)
    found = weights[..., :known] @ before_values + weights[..., known:] @ value_rGSK
    return found.view(rows, -1, new, width).transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Which columns a token sees, [r, 1, S, C]; always spelled out."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention)


AttentionMaskInterface.register(NAME, _mask)


def is_supported(model: Any) -> bool:
    """Whether the model lets its attention be chosen, and computes what it would compute by itself."""
    decoder: Any = decoder_of(model)
    replaceable = getattr(decoder, "_supports_attention_backend", False)
    return replaceable and decoder.config._attn_implementation in ("eager", "sdpa")


@contextlib.contextmanager
def kept_prefix(model: Any, entries: Sequence[Entry]) -> Iterator[DynamicCache]:
    """Inside, the model's attention sees these keys and values [r, G, P, K] per block before the tokens it is given.

    Yields the cache to call the model with; new keys and values are not added to it.
    """
    decoder: Any = decoder_of(model)
    config = decoder.config
    own = config._attn_implementation
    cache = DynamicCache()
    cache.layers = [_PrefixLayer(entry) for entry in entries]
    _kept.append(entries)
    config._attn_implementation = NAME
    try:
        yield cache
    finally:
        config._attn_implementation = own
        _kept.pop()
