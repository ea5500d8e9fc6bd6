"""Attention over a cached prefix and a few new tokens, kept apart.

Concatenated, the keys and values of a row would be copied, repeated for every query head and saved for the backward
pass in each block. Kept apart, the prefix is read in place and never differentiated. The result equals the model's own
attention up to rounding: scores over the prefix and over the new tokens are concatenated before the softmax.

The prefix travels with the cache: the ``update`` of a cache layer returns the new keys with the layer's prefix
attached, and the attention function reads it there, so models in different threads cannot see each other's prefixes.

Shapes: R rows, H query heads in G key heads, S new tokens, P prefix columns, C = P + S columns, K head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from edit_hooks.modeling.architectures import block_owner
from edit_hooks.modeling.forward.prefix_cache import KeysValues
from edit_hooks.modeling.support import prefix_stays_apart
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.scopes import NestedStates

NAME = "cached_prefix"  # of the attention implementation in transformers


# The attention implementation of a decoder, while this one is in its place.
_implementations: NestedStates[nn.Module, str] = NestedStates()

PREFIX = "prefix_keys_values"  # attribute of the keys that a `_PrefixLayer` returns


class _PrefixLayer(DynamicLayer):
    """Cache layer with a constant prefix.

    New keys and values are passed through and not stored.
    """

    def __init__(self, prefix: KeysValues) -> None:
        super().__init__()
        self.keys, self.values = prefix
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> KeysValues:
        setattr(key_states, PREFIX, (self.keys, self.values))
        return key_states, value_states


def _attend(
    _module: Any,
    query_RHSK: torch.Tensor,
    key_RGSK: torch.Tensor,
    value_RGSK: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function as transformers calls it; the prefix comes with the keys."""
    prefix_keys, prefix_values = getattr(key_RGSK, PREFIX)
    rows, _, new, width = query_RHSK.shape
    groups, known = key_RGSK.shape[1], prefix_keys.shape[2]
    # Query heads that share a key head are adjacent: fold them into the query axis of that key head.
    # Scores are products of the full width: 16 bits overflow (float16) or round them (bfloat16) where sdpa does not.
    query, prefix_keys, key = map(at_least_float32, (query_RHSK, prefix_keys, key_RGSK))
    query = query.reshape(rows, groups, -1, width)
    scores = torch.cat([query @ prefix_keys.transpose(2, 3), query @ key.transpose(2, 3)], 3)
    scores = scores * (scaling if scaling is not None else width**-0.5)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.view(rows, groups, -1, new, known + new)
    # Not -inf: padding far behind a row may see no column of a sliding window. A softmax over -inf alone is NaN, which
    # spreads to other tokens even through zero attention weights.
    scores = scores.masked_fill(~attention_mask[:, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(value_RGSK.dtype).view(rows, groups, -1, known + new)
    attended = weights[..., :known] @ prefix_values + weights[..., known:] @ value_RGSK
    return attended.view(rows, -1, new, width).transpose(1, 2).contiguous(), None


def _build_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Boolean mask [R, 1, S, C] of visible columns.

    Always built, also where transformers would skip it.
    """
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def _register() -> None:
    """Add the attention and its mask to the tables of transformers; idempotent."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _build_mask)


def is_supported(model: Any) -> bool:
    """Whether the model's attention can be replaced without changing its result."""
    decoder: Any = block_owner(model)
    replaceable = getattr(decoder, "_supports_attention_backend", False) and prefix_stays_apart(model)
    return replaceable and decoder.config._attn_implementation in ("eager", "sdpa")


@contextlib.contextmanager
def cached_prefix(model: Any, layers: Sequence[KeysValues]) -> Iterator[DynamicCache]:
    """Let the model attend to a prefix in front of the tokens it is called with.

    The attention implementation of the model's config is replaced inside, so one model must not be used in two threads
    at once; different models may.

    Args:
        layers: keys and values [R, G, P, K] of the prefix, per block.

    Yields:
        The cache to call the model with. Calls do not add to it.
    """
    _register()
    decoder: Any = block_owner(model)
    config = decoder.config
    cache = DynamicCache()
    cache.layers = [_PrefixLayer(layer) for layer in layers]

    def attend_with(implementation: str) -> None:
        config._attn_implementation = implementation

    own = config._attn_implementation
    with _implementations.changed(decoder, own, lambda: attend_with(NAME), attend_with):
        yield cache
