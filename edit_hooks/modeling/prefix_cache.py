"""Prefix cache: keys and values of the tokens before the fact tokens.

The rows of several edits begin with the same context templates. Each row is split into a head, which it shares with
other rows, and a rest: the distinct heads run through the model once, then the rests on top of them. This is exact
under causal attention.

Shapes: R rows, T columns, P prefix columns, H key heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.kv_cache import right_padded, shift_columns

KeysValues = tuple[torch.Tensor, torch.Tensor]  # of one block


MIN_TOKENS_SAVED = 32  # below that, an additional forward pass costs more than it saves


@dataclass
class PrefixCache:
    """Right-aligned keys and values of token prefixes.

    Attributes:
        layers: [R, H, P, K] per block. length_R: number of tokens of each row.
    """

    layers: list[KeysValues]
    length_R: torch.Tensor

    @property
    def width(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def mask_RP(self) -> torch.Tensor:
        """1 where a column holds a token."""
        columns_P = torch.arange(self.width, device=self.length_R.device)
        return (columns_P >= self.width - self.length_R[:, None]).long()

    def select(self, rows: torch.Tensor) -> PrefixCache:
        """The cache of some rows, as wide as the longest of them."""
        length_R = self.length_R[rows]
        start = self.width - int(length_R.max())
        layers = [
            (keys[rows.to(keys.device)][:, :, start:], values[rows.to(values.device)][:, :, start:])
            for keys, values in self.layers
        ]
        return PrefixCache(layers, length_R)


@torch.no_grad()
def compute_prefix_cache(model: Any, rows: Sequence[Sequence[int]], share: bool = True) -> PrefixCache | None:
    """Run token rows and return their keys and values; ``None`` if all are empty.

    Args:
        share: compute shared beginnings once; only where equal tokens have equal input embeddings.
    """
    if not any(rows):
        return None
    lengths = shared_head_lengths(rows) if share else []
    if not any(lengths):
        return _extend(model, None, rows)
    heads = {tuple(row[:length]): None for row, length in zip(rows, lengths, strict=True)}
    number_of = {head: number for number, head in enumerate(heads)}
    head_R = [number_of[tuple(row[:length])] for row, length in zip(rows, lengths, strict=True)]
    cache = _extend(model, None, list(heads)).select(torch.tensor(head_R, device=input_device(model)))
    return _extend(model, cache, [row[length:] for row, length in zip(rows, lengths, strict=True)])


class _Partition(NamedTuple):
    """A choice of heads.

    Attributes:
        saved: tokens that need not be computed. groups: rows that share a head, and the head's length.
    """

    saved: int
    groups: list[tuple[list[int], int]]


def shared_head_lengths(rows: Sequence[Sequence[int]]) -> list[int]:
    """Length of the head that each row shares with others, 0 for none.

    The heads are chosen so that the fewest tokens are computed.
    """
    lengths = [0] * len(rows)
    partition = _best_partition(rows, list(range(len(rows))), 0)
    if partition.saved >= MIN_TOKENS_SAVED:
        for members, length in partition.groups:
            for index in members:
                lengths[index] = length
    return lengths


def _best_partition(rows: Sequence[Sequence[int]], members: list[int], depth: int) -> _Partition:
    """Find the heads that save the most tokens, for rows that agree up to ``depth``.

    Recursion over the prefix tree: at every branching, either all members share the tokens so far, or each branch
    finds its own, longer heads.
    """
    if len(members) < 2:
        return _Partition(0, [])
    first = rows[members[0]]
    shortest = min(len(rows[index]) for index in members)
    while depth < shortest and all(rows[index][depth] == first[depth] for index in members):
        depth += 1
    branches: dict[int, list[int]] = {}
    for index in members:
        if len(rows[index]) > depth:
            branches.setdefault(rows[index][depth], []).append(index)
    partitions = [_best_partition(rows, branch, depth + 1) for branch in branches.values()]
    saved_apart, saved_together = sum(partition.saved for partition in partitions), (len(members) - 1) * depth
    if saved_together >= saved_apart:
        return _Partition(saved_together, [(members, depth)])
    return _Partition(saved_apart, [group for partition in partitions for group in partition.groups])


def _extend(model: Any, prefix: PrefixCache | None, rows: Sequence[Sequence[int]]) -> PrefixCache:
    """Run rows on top of a prefix; the cache of both together."""
    if prefix is not None and not any(rows):
        return prefix
    device = input_device(model)
    ids_RT, mask_RT = right_padded(rows, device)
    new_R = mask_RT.sum(1)  # new tokens of each row
    length_R, known = new_R, 0
    arguments: dict[str, Any] = {"past_key_values": DynamicCache()}
    if prefix is not None:
        known, length_R = prefix.width, new_R + prefix.length_R
        columns_RT = torch.arange(ids_RT.shape[1], device=device).minimum((new_R[:, None] - 1).clamp(min=0))
        arguments = {
            "past_key_values": DynamicCache(prefix.layers),
            "position_ids": prefix.length_R[:, None] + columns_RT,
        }
        mask_RT = torch.cat([prefix.mask_RP, mask_RT], 1)
    decoder_of(model)(input_ids=ids_RT, attention_mask=mask_RT, use_cache=True, **arguments)
    # The tokens of a row are contiguous around column `known`: its prefix ends there and its new tokens begin there.
    width = int(length_R.max())
    end_R = known + new_R
    index_RP = end_R[:, None] - width + torch.arange(width, device=device)
    index_RP = torch.where(index_RP >= (end_R - length_R)[:, None], index_RP, -1)
    cache = arguments["past_key_values"]
    layers = [(shift_columns(layer.keys, index_RP), shift_columns(layer.values, index_RP)) for layer in cache.layers]
    return PrefixCache(layers, length_R)
