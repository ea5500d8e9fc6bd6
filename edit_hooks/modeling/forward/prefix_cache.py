"""Prefix cache: keys and values of tokens that stand before others.

Rows often begin alike: the rows of several edits with the same context templates, questions with the same
demonstrations. Each row is split into a head, which it shares with other rows, and a rest: the distinct heads run
through the model once, then the rests on top of them. This is exact under causal attention.

Shapes: R rows, T columns, P prefix columns, H key heads, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache

from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.forward.kv_cache import CACHE, right_padded, shift_columns

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

    def widened(self, columns: int) -> PrefixCache:
        """The cache with more columns of padding in front."""
        pad = functools.partial(nn.functional.pad, pad=(0, 0, columns, 0))
        return PrefixCache([(pad(keys), pad(values)) for keys, values in self.layers], self.length_R)

    def repeated(self, rows: int) -> PrefixCache:
        """The cache of a single row, for ``rows`` rows; the memory is shared."""
        layers = [(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in self.layers]
        return PrefixCache(layers, self.length_R.expand(rows))

    def inputs(self, ids_RT: torch.Tensor, mask_RT: torch.Tensor) -> dict[str, Any]:
        """Arguments of a decoder that reads right-padded rows on top of the prefix and adds them to the cache."""
        columns_RT = torch.arange(ids_RT.shape[1], device=ids_RT.device).minimum(
            (mask_RT.sum(1, keepdim=True) - 1).clamp(min=0)
        )
        return {
            "input_ids": ids_RT,
            "attention_mask": torch.cat([self.mask_RP, mask_RT], 1),
            "position_ids": self.length_R[:, None] + columns_RT,
            CACHE: DynamicCache(self.layers),
        }


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


class SharedHead(NamedTuple):
    """Rows that begin alike, by their index, and the number of tokens that they share."""

    rows: list[int]
    length: int


def shared_head_lengths(rows: Sequence[Sequence[int]]) -> list[int]:
    """Length of the head that each row shares with others, 0 for none.

    The heads are chosen so that the fewest tokens are computed.
    """
    lengths = [0] * len(rows)
    heads = shared_heads(rows)
    if sum((len(head.rows) - 1) * head.length for head in heads) >= MIN_TOKENS_SAVED:
        for head in heads:
            for index in head.rows:
                lengths[index] = head.length
    return lengths


@dataclass
class _Branch:
    """Sorted rows from ``start`` on that agree up to ``depth``, and the best choice of heads inside it so far."""

    depth: int
    start: int
    saved: int = 0
    heads: list[SharedHead] = field(default_factory=list)

    def add(self, branch: _Branch) -> None:
        self.saved += branch.saved
        self.heads += branch.heads


def shared_heads(rows: Sequence[Sequence[int]], min_length: int = 1) -> list[SharedHead]:
    """The groups of rows that share a head; a row is in at most one of them.

    The heads are chosen so that the fewest tokens are computed, among heads of at least ``min_length`` tokens. At every
    branching of the prefix tree either all its rows share the tokens so far, or each branch has its own, longer heads.
    The tree's branchings are found from the agreement of neighbors in sorted order, the innermost first.
    """
    tokens = [tuple(row) for row in rows]
    order = sorted(range(len(rows)), key=tokens.__getitem__)
    root = _Branch(0, 0)
    open_branches = [root]
    for position in range(1, len(order) + 1):
        depth = _agreement(tokens[order[position - 1]], tokens[order[position]]) if position < len(order) else 0
        closed = None
        while open_branches[-1].depth > depth:
            branch = open_branches.pop()
            if closed is not None:
                branch.add(closed)
            closed = _with_own_head(branch, order[branch.start : position], min_length)
        if open_branches[-1].depth < depth:
            open_branches.append(_Branch(depth, position - 1 if closed is None else closed.start))
        if closed is not None:
            open_branches[-1].add(closed)
    return root.heads


def _with_own_head(branch: _Branch, members: list[int], min_length: int) -> _Branch:
    """The branch with one head for all its rows, if that saves at least as many tokens as the heads inside it."""
    saved = (len(members) - 1) * branch.depth
    if branch.depth < min_length or saved < branch.saved:
        return branch
    return _Branch(branch.depth, branch.start, saved, [SharedHead(members, branch.depth)])


def _agreement(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Number of tokens at the beginning that two rows have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _extend(model: Any, prefix: PrefixCache | None, rows: Sequence[Sequence[int]]) -> PrefixCache:
    """Run rows on top of a prefix; the cache of both together."""
    if prefix is not None and not any(rows):
        return prefix
    device = input_device(model)
    ids_RT, mask_RT = right_padded(rows, device)
    new_R = mask_RT.sum(1)  # new tokens of each row
    length_R, known = new_R, 0
    inputs: dict[str, Any] = {"input_ids": ids_RT, "attention_mask": mask_RT, CACHE: DynamicCache()}
    if prefix is not None:
        known, length_R = prefix.width, new_R + prefix.length_R
        inputs = prefix.inputs(ids_RT, mask_RT)
    decoder_of(model)(**inputs, use_cache=True)
    # The tokens of a row are contiguous around column `known`: its prefix ends there and its new tokens begin there.
    width = int(length_R.max())
    end_R = known + new_R
    index_RP = end_R[:, None] - width + torch.arange(width, device=device)
    index_RP = torch.where(index_RP >= (end_R - length_R)[:, None], index_RP, -1)
    cache = inputs[CACHE]
    layers = [(shift_columns(layer.keys, index_RP), shift_columns(layer.values, index_RP)) for layer in cache.layers]
    return PrefixCache(layers, length_R)
