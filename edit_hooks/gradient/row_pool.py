"""Logits at the labels of chosen rows, of a fixed set of rows, while some linear maps are trained.

A step of a trainer may need a few rows of many: those that it draws. :class:`CachedPool` computes once, for every row,
the states that do not depend on the trained maps, and runs the chosen rows from there. :class:`PlainPool` runs every
chosen row alone through the whole model.

Several edits may train side by side, each with its own weights: the rows of one call are given by edit, as many for
each, and stay adjacent, as :class:`~edit_hooks.gradient.weight_copies.WeightCopies` requires. Shapes: L labels of an
edit's chosen rows, W selected tokens, R rows, T columns, d residual width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.gradient.label_forward import CachedLabelForward
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding
from edit_hooks.modeling.forward.lm_head import ModelHead, TokenSelection, select_tokens
from edit_hooks.modeling.hooks import CachedOutput
from edit_hooks.modeling.tensors import at_least_float32


class RowPool(Protocol):
    """Rows of which some are run at a time."""

    def logits(self, chosen: Sequence[Sequence[int]], tokens: Sequence[TokenSelection]) -> list[torch.Tensor]:
        """Logits [L, W] at the labels of the chosen rows of every edit, in the order of the rows; differentiable.

        Args:
            chosen: indices of rows by edit, as many for each edit.
            tokens: the part of the vocabulary by edit.
        """


class PlainPool:
    """Every chosen row alone, through all blocks, with all logits."""

    def __init__(self, model: Any, rows: Sequence[LabeledRow], trained: Sequence[str]) -> None:
        self.model, self.rows = model, rows

    def logits(self, chosen: Sequence[Sequence[int]], tokens: Sequence[TokenSelection]) -> list[torch.Tensor]:
        return [
            torch.cat([self._logits(self.rows[index], selected) for index in of_edit])
            for of_edit, selected in zip(chosen, tokens, strict=True)
        ]

    def _logits(self, row: LabeledRow, tokens: TokenSelection) -> torch.Tensor:
        ids_1T = torch.tensor([row.ids], device=input_device(self.model))
        logits_TV = self.model(input_ids=ids_1T, use_cache=False).logits[0]
        return at_least_float32(select_tokens(logits_TV[[column for column, _ in row.labels]], tokens))


class CachedPool:
    """Chosen rows from their cached states on, in two groups of similar length, with the selected logits only."""

    def __init__(self, model: Any, rows: Sequence[LabeledRow], trained: Sequence[str]) -> None:
        self.model, self.rows, self.trained = model, rows, trained
        self.head = ModelHead(model)
        self.outputs: list[list[torch.Tensor]] = [[] for _ in rows]  # by row, the [T, ...] of every fixed module
        self.tuple_lengths: list[int | None] = []
        lengths = [len(row.ids) for row in rows]
        for group in group_by_length(lengths, max_padding(input_device(model), lengths)):
            cached = CachedLabelForward(model, batch_rows(model, [rows[index] for index in group]), trained)
            self.tuple_lengths = [output.tuple_length for output in cached.outputs]
            for position, index in enumerate(group):
                self.outputs[index] = [output.hidden[position, : lengths[index]] for output in cached.outputs]

    def logits(self, chosen: Sequence[Sequence[int]], tokens: Sequence[TokenSelection]) -> list[torch.Tensor]:
        lengths = [[len(self.rows[index].ids) for index in of_edit] for of_edit in chosen]
        longest_first = [sorted(range(len(own)), key=own.__getitem__, reverse=True) for own in lengths]
        cut = self._best_cut([sorted(own, reverse=True) for own in lengths])
        states: list[dict[int, torch.Tensor]] = [{} for _ in chosen]  # by edit and position among its chosen rows
        for part in (slice(0, cut), slice(cut, None)):
            places = [(edit, position) for edit, order in enumerate(longest_first) for position in order[part]]
            if places:
                found = self._states([chosen[edit][position] for edit, position in places])
                for (edit, position), states_LD in zip(places, found, strict=True):
                    states[edit][position] = states_LD
        return [
            at_least_float32(self.head.logits(torch.cat([own[position] for position in sorted(own)]), selected))
            for own, selected in zip(states, tokens, strict=True)
        ]

    @staticmethod
    def _best_cut(lengths: Sequence[Sequence[int]]) -> int:
        """How many of the longest rows of every edit form the first group, so that both have the fewest tokens."""
        width = [max(at_rank) for at_rank in itertools.zip_longest(*lengths, fillvalue=0)]
        costs = [cut * width[0] + (len(width) - cut) * width[cut] for cut in range(len(width))]
        return costs.index(min(costs))

    def _states(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """Inputs [L, d] of the head at the labels of every row."""
        rows = [self.rows[index] for index in indices]
        columns = zip(*(self.outputs[index] for index in indices), strict=True)
        outputs = [
            CachedOutput(nn.utils.rnn.pad_sequence(list(hidden), batch_first=True), tuple_length)
            for hidden, tuple_length in zip(columns, self.tuple_lengths, strict=True)
        ]
        forward = CachedLabelForward(self.model, batch_rows(self.model, rows), self.trained, outputs)
        return forward.label_states().split([len(row.labels) for row in rows])


POOLS: dict[str, type[PlainPool] | type[CachedPool]] = {"fast": CachedPool, "reference": PlainPool}
