"""Rows of different lengths in one batch: padding, groups of similar length, right-aligned caches.

Padding on the right is exact under causal attention. After the prefill the cache is shifted so that every row ends in
the last column; decoding then appends one column per step and computes no padding.

Shapes: R rows, T columns, H key heads, K head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

# Names of the cache among the arguments of models and the fields of their outputs: transformers 5.24 renamed both. It
# takes the old argument, too, but names it so only to the module that is called: hooks inside see the new one.
CACHE_NAMES = ("cache", "past_key_values")
# That of the installed transformers.
CACHE = next(
    name for name in CACHE_NAMES if name in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
)

# Padding tokens that cost more than another forward pass, in which a CPU reads all weights.
MAX_PADDING_CPU = 24
# On a GPU a pass waits for thousands of launches: 16 edits in one group took 0.25 s each on an H100, in several 0.42 s
# (R-ROME on Llama 3 8B). A group may have as many padding tokens as all rows have others.
PADDING_SHARE_GPU = 1.0


class AlignedCache(NamedTuple):
    """A right-aligned cache and its mask [R, T] (1: token, 0: padding)."""

    cache: DynamicCache
    mask_RT: torch.Tensor


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows with zeros on the right: token ids and their mask (1: token), [R, T]."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)


def max_padding(device: torch.device, lengths: Sequence[int]) -> int:
    """Padding tokens of a group of rows of these lengths (:func:`group_by_length`), by kind of device."""
    return int(PADDING_SHARE_GPU * sum(lengths)) if device.type == "cuda" else MAX_PADDING_CPU


def group_by_length(lengths: Sequence[int], padding_limit: int) -> list[list[int]]:
    """Group indices by length, with at most ``padding_limit`` padding tokens per group.

    Shortest first.
    """
    groups: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups:
            padding += (lengths[index] - lengths[groups[-1][-1]]) * len(groups[-1])
        if not groups or padding > padding_limit:
            groups.append([])
            padding = 0
        groups[-1].append(index)
    return groups


def right_aligned(cache: DynamicCache, length_R: torch.Tensor, width: int) -> AlignedCache:
    """Shift the cache of a right-padded prefill so that rows end in the last column.

    ``width`` is the number of columns of the prefill.
    """
    index_RT = length_R[:, None] - width + torch.arange(width, device=length_R.device)
    shifted = [(shift_columns(layer.keys, index_RT), shift_columns(layer.values, index_RT)) for layer in cache.layers]
    return AlignedCache(DynamicCache(shifted), (index_RT >= 0).long())


def select_rows(cache: DynamicCache, rows: torch.Tensor) -> DynamicCache:
    """The cache of some of the rows; every layer stays on its device."""

    def select(states_RHTK: torch.Tensor) -> torch.Tensor:
        return states_RHTK[rows.to(states_RHTK.device)]

    return DynamicCache([(select(layer.keys), select(layer.values)) for layer in cache.layers])


def shift_columns(states_RHTK: torch.Tensor, index_RP: torch.Tensor) -> torch.Tensor:
    """Take column p of row r from column ``index_RP[r, p]``: [R, H, P, K].

    A negative index marks padding and gives zeros, because masked keys must be finite too.
    """
    heads, width = states_RHTK.shape[1], states_RHTK.shape[3]
    index_RP = index_RP.to(states_RHTK.device)
    index = index_RP.clamp(min=0)[:, None, :, None].expand(-1, heads, -1, width)
    return torch.where((index_RP >= 0)[:, None, :, None], states_RHTK.gather(2, index), 0)
