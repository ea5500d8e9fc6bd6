"""Keys and values of what stands before the fact tokens; beginnings that rows share are computed once.

The rows of several edits begin with the same context templates. Each row is cut into a head, which it shares with other
rows, and the rest: the distinct heads run through the model once, then the rests on top of them. Exact, because a
token sees nothing behind it.

Shapes: R rows, T columns, P prefix columns, H heads of attention, K head width, d residual width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.kv_cache import right_padded, shift_columns

Entry = tuple[torch.Tensor, torch.Tensor]


FEWEST_SAVED = 32  # tokens; below that another pass costs more than it saves


@dataclass
class Prefix:
    """Keys and values [R, H, P, K] of every block, right-aligned, and how many of the columns hold tokens [R]."""

    entries: list[Entry]
    length_R: torch.Tensor

    @property
    def width(self) -> int:
        return self.entries[0][0].shape[2]

    @property
    def mask_RP(self) -> torch.Tensor:
        columns_P = torch.arange(self.width, device=self.length_R.device)
        return (columns_P >= self.width - self.length_R[:, None]).long()

    def rows(self, index_R: torch.Tensor) -> Prefix:
        """The prefixes of some rows, as wide as the longest of them."""
        length_R = self.length_R[index_R]
        start = self.width - int(length_R.max())
        parts = [[part[index_R.to(part.device)][:, :, start:] for part in entry] for entry in self.entries]
        return Prefix([(keys, values) for keys, values in parts], length_R)


@torch.no_grad()
def keys_and_values(model: Any, rows: Sequence[Sequence[int]], share: bool = True) -> Prefix | None:
    """Keys and values of token rows on the unedited model; ``None`` when all rows are empty.

    Args:
        share: whether equal tokens mean equal inputs (not so where something is added to their embeddings).
    """
    if not any(rows):
        return None
    lengths = shared_heads(rows) if share else []
    if not any(lengths):
        return _on_top(model, None, rows)
    heads = {tuple(row[:length]): None for row, length in zip(rows, lengths, strict=True)}
    number = {head: index for index, head in enumerate(heads)}
    computed = _on_top(model, None, list(heads))
    index_R = torch.tensor([number[tuple(row[:n])] for row, n in zip(rows, lengths, strict=True)])
    index_R = index_R.to(input_device(model))
    return _on_top(model, computed.rows(index_R), [row[n:] for row, n in zip(rows, lengths, strict=True)])


def shared_heads(rows: Sequence[Sequence[int]]) -> list[int]:
    """Per row the length of the head it shares with others, so that the fewest tokens are computed; 0: none."""
    lengths = [0] * len(rows)

    def cut(members: list[int], depth: int) -> tuple[int, list[tuple[list[int], int]]]:
        """The most tokens that heads at least ``depth`` long can save among members that agree so far."""
        if len(members) < 2:
            return 0, []
        shortest = min(len(rows[index]) for index in members)
        first = rows[members[0]]
        while depth < shortest and all(rows[index][depth] == first[depth] for index in members):
            depth += 1
        branches: dict[int, list[int]] = {}
        for index in members:
            if len(rows[index]) > depth:
                branches.setdefault(rows[index][depth], []).append(index)
        parts = [cut(branch, depth + 1) for branch in branches.values()]
        apart, together = sum(saved for saved, _ in parts), (len(members) - 1) * depth
        if together >= apart:
            return together, [(members, depth)]
        return apart, [head for _, heads in parts for head in heads]

    saved, heads = cut(list(range(len(rows))), 0)
    if saved < FEWEST_SAVED:
        return lengths
    for members, depth in heads:
        for index in members:
            lengths[index] = depth
    return lengths


def _on_top(model: Any, before: Prefix | None, rows: Sequence[Sequence[int]]) -> Prefix:
    """Keys and values of rows that go on after ``before``, together with those."""
    if before is not None and not any(rows):
        return before
    device = input_device(model)
    ids_RT, mask_RT = right_padded(rows, device)
    length_R = mask_RT.sum(1)
    more: dict[str, Any] = {}
    cache, known = DynamicCache(), 0
    if before is not None:
        cache, known = DynamicCache(before.entries), before.width
        steps_RT = torch.arange(ids_RT.shape[1], device=device).minimum((length_R[:, None] - 1).clamp(min=0))
        more["position_ids"] = before.length_R[:, None] + steps_RT
        mask_RT = torch.cat([before.mask_RP, mask_RT], 1)
        length_R = length_R + before.length_R
    decoder_of(model)(input_ids=ids_RT, attention_mask=mask_RT, past_key_values=cache, use_cache=True, **more)
    # The tokens of a row stand side by side around column `known`: the head ends there, the rest begins there.
    width = int(length_R.max())
    end_R = known + length_R - (before.length_R if before is not None else 0)
    index_RP = end_R[:, None] - width + torch.arange(width, device=device)
    index_RP = torch.where(index_RP >= (end_R - length_R)[:, None], index_RP, -1)
    shifted = [(shift_columns(entry.keys, index_RP), shift_columns(entry.values, index_RP)) for entry in cache.layers]
    return Prefix(shifted, length_R)
