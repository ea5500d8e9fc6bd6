"""Attention over a cached prefix and a few new tokens, kept apart.

Concatenated, the keys and values of a row would be copied, repeated for every query head and saved for the backward
pass in each block. Kept apart, the prefix is read in place and never differentiated. The result equals the model's own
attention up to rounding: scores over the prefix and over the new tokens are concatenated before the softmax.

The prefix travels with the cache: the ``update`` of a cache layer returns the new keys with the layer's prefix
attached, and the attention function reads it there, so models in different threads cannot see each other's prefixes.

On a GPU the many small products of this form wait for their launches. There the prefix has columns for the new tokens
behind it (:func:`with_room`), and the attention of all of them is one fused product (``sdpa``), which accumulates
scores in float32 without float32 copies of 16-bit keys.

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

# Names of the attention implementations in transformers: of a prefix that is kept apart, and of one with room.
NAME, FUSED_NAME = "cached_prefix", "cached_prefix_fused"


# The attention implementation of a decoder, while this one is in its place.
_implementations: NestedStates[nn.Module, str] = NestedStates()

MASK_STEP = 16  # numbers, of which the rows of a mask have multiples in memory
PREFIX = "prefix_keys_values"  # attribute of the keys that a `_PrefixLayer` returns
FOLDED = "folded_mask"  # attribute of a mask that the layers of a pass share: the mask of their fused product


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


class _RoomLayer(DynamicLayer):
    """Cache layer with a constant prefix and room for new keys and values, which every pass overwrites."""

    def __init__(self, whole: KeysValues, new: int) -> None:
        super().__init__()
        self.whole, self.known = whole, whole[0].shape[2] - new
        self.keys, self.values = (states[:, :, : self.known] for states in whole)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> KeysValues:
        keys, values = self.whole
        return _Appended.apply(key_states, keys, self.known), _Appended.apply(value_states, values, self.known)


class _Appended(torch.autograd.Function):
    """New states written behind a constant prefix; the gradient reaches the new ones only.

    A pass overwrites the states of the pass before it, whose backward pass must be over.
    """

    @staticmethod
    def forward(ctx: Any, new_RGSK: torch.Tensor, whole_RGCK: torch.Tensor, known: int) -> torch.Tensor:
        ctx.known = known
        whole_RGCK[:, :, known:] = new_RGSK
        return whole_RGCK.detach()

    @staticmethod
    def backward(ctx: Any, gradient_RGCK: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient_RGCK[:, :, ctx.known :], None, None


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


def _attend_fused(
    module: Any,
    query_RHSK: torch.Tensor,
    key_RGCK: torch.Tensor,
    value_RGCK: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function as transformers calls it, over the keys and values of prefix and new tokens together."""
    if softcap is not None:  # sdpa cannot cap scores
        known = key_RGCK.shape[2] - query_RHSK.shape[2]
        new_key = key_RGCK[:, :, known:]
        setattr(new_key, PREFIX, (key_RGCK[:, :, :known].detach(), value_RGCK[:, :, :known].detach()))
        new_value = value_RGCK[:, :, known:]
        return _attend(module, query_RHSK, new_key, new_value, attention_mask, scaling, softcap, **kwargs)
    rows, heads, new, width = query_RHSK.shape
    groups = key_RGCK.shape[1]
    # Query heads that share a key head are adjacent: fold them into the query axis of that key head. So keys are not
    # repeated; `enable_gqa` of sdpa has no fused kernel with a mask.
    query = query_RHSK.reshape(rows, groups, -1, width)
    mask = _folded_mask(attention_mask, heads // groups, query.dtype)
    attended = nn.functional.scaled_dot_product_attention(query, key_RGCK, value_RGCK, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, new, -1).transpose(1, 2).contiguous(), None


def _folded_mask(mask_R1SC: torch.Tensor, share: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask for ``share`` query heads, one after another on the query axis: 0 or -inf, added to the scores.

    Computed once for the layers of a pass. A token that sees nothing, as padding far behind a row under a sliding
    window, sees everything: the softmax over no column is NaN, which spreads to other tokens even through zero
    attention weights.
    """
    folded: torch.Tensor | None = getattr(mask_R1SC, FOLDED, None)
    if folded is None:
        is_seen = mask_R1SC | ~mask_R1SC.any(-1, keepdim=True)
        # In every layer sdpa would make such a mask of a boolean one, and would copy one whose rows are not aligned.
        columns = is_seen.shape[-1]
        folded = torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, -torch.inf).repeat(1, 1, share, 1)
        folded = nn.functional.pad(folded, (0, -columns % MASK_STEP))[..., :columns]
        setattr(mask_R1SC, FOLDED, folded)
    return folded


def _build_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Boolean mask [R, 1, S, C] of visible columns.

    Always built, also where transformers would skip it.
    """
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def _register() -> None:
    """Add the attention and its mask to the tables of transformers; idempotent."""
    for name, attend in ((NAME, _attend), (FUSED_NAME, _attend_fused)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, _build_mask)


def is_supported(model: Any) -> bool:
    """Whether the model's attention can be replaced without changing its result."""
    decoder: Any = block_owner(model)
    replaceable = getattr(decoder, "_supports_attention_backend", False) and prefix_stays_apart(model)
    # sdpa of earlier releases (5.17, not 5.24) leaves out the cap of Gemma 2's scores, which both forms here apply.
    is_capped = getattr(decoder.config, "attn_logit_softcapping", None) is not None
    return replaceable and decoder.config._attn_implementation in (("eager",) if is_capped else ("eager", "sdpa"))


def with_room(layers: Sequence[KeysValues], new: int) -> list[KeysValues]:
    """Keys and values of a prefix, each with ``new`` more columns behind it."""

    def padded(states_RGPK: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(states_RGPK, (0, 0, 0, new))

    return [(padded(keys), padded(values)) for keys, values in layers]


@contextlib.contextmanager
def cached_prefix(model: Any, layers: Sequence[KeysValues], room: int = 0) -> Iterator[DynamicCache]:
    """Let the model attend to a prefix in front of the tokens it is called with.

    The attention implementation of the model's config is replaced inside, so one model must not be used in two threads
    at once; different models may.

    Args:
        layers: keys and values [R, G, P, K] of the prefix, per block.
        room: columns at the end of the layers that are not the prefix (:func:`with_room`), as many as the model is
            called with; the fused form is used with them.

    Yields:
        The cache to call the model with. Calls do not add to it.
    """
    cache = DynamicCache()
    cache.layers = [_RoomLayer(layer, room) if room else _PrefixLayer(layer) for layer in layers]
    with _attention(model, FUSED_NAME if room else NAME):
        yield cache


@contextlib.contextmanager
def fused_attention(model: Any) -> Iterator[None]:
    """Attention without a prefix in the fused form, if the model's can be replaced.

    transformers asks the values of a mask whether it can do without one, which a GPU waits for.
    """
    if not is_supported(model):
        yield
        return
    with _attention(model, FUSED_NAME):
        yield


@contextlib.contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Another attention implementation in the config of a model."""
    _register()
    decoder: Any = block_owner(model)
    config = decoder.config

    def attend_with(implementation: str) -> None:
        config._attn_implementation = implementation

    own = config._attn_implementation
    with _implementations.changed(decoder, own, lambda: attend_with(name), attend_with):
        yield
