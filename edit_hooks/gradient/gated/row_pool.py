"""Logits at the labels of chosen rows, of a fixed set of rows, while some linear maps are trained.

A step of a trainer may need a few rows of many: those that it draws. :class:`CachedPool` runs every row once before
the training, what several rows begin with only once for all. It keeps the states that do not depend on the trained
maps, and runs the chosen rows from there. :class:`PlainPool` runs every row alone through the whole model.

Several edits may train side by side, each with its own weights: the rows of one call are given by edit, as many for
each, and stay adjacent, as :class:`~edit_hooks.gradient.weight_copies.WeightCopies` requires. Shapes: L labels of an
edit's chosen rows, W selected tokens, R rows, T columns, d residual width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.gradient.label_forward import CachedLabelForward, fixed_modules, recording_outputs
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows
from edit_hooks.gradient.side_by_side import memory_budget
from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding
from edit_hooks.modeling.forward.lm_head import ModelHead, TokenSelection, select_tokens
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache, shared_head_lengths
from edit_hooks.modeling.forward.sampling import keeps_rows_apart
from edit_hooks.modeling.hooks import CachedOutput, select_positions
from edit_hooks.modeling.memory import bytes_per_token
from edit_hooks.modeling.tensors import at_least_float32


class RowPool(Protocol):
    """Rows of which some are run at a time."""

    def logits_before(self, chosen: Sequence[int], tokens: TokenSelection) -> torch.Tensor:
        """Logits [L, W] at the labels of rows with the weights that the pool was made with; not differentiable."""

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

    @torch.no_grad()
    def logits_before(self, chosen: Sequence[int], tokens: TokenSelection) -> torch.Tensor:
        return self.logits([chosen], [tokens])[0]

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
        self.fixed = fixed_modules(model, trained)
        self.outputs: list[list[torch.Tensor]] = [[] for _ in rows]  # by row, the [T, ...] of every fixed module
        self.tuple_lengths: list[int | None] = []
        self.states_before: list[torch.Tensor] = [torch.empty(0) for _ in rows]  # by row, the [L, d] of the head
        self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """Run every row once: what rows begin with before their first label, then the rest of each."""
        beginnings = [row.ids[: min(column for column, _ in row.labels)] for row in self.rows]
        lengths = [0] * len(self.rows)
        if keeps_rows_apart(self.model):
            lengths = shared_head_lengths(beginnings)
        heads = {tuple(row.ids[:length]): None for row, length in zip(self.rows, lengths, strict=True)}
        number_of = {head: number for number, head in enumerate(heads)}
        head_R = [number_of[tuple(row.ids[:length])] for row, length in zip(self.rows, lengths, strict=True)]
        prefix, before = None, dict[str, CachedOutput]()
        if any(lengths):
            with recording_outputs(self.model, self.fixed, before):
                prefix = compute_prefix_cache(self.model, list(heads), share=False)
        rests = [len(row.ids) - length for row, length in zip(self.rows, lengths, strict=True)]
        for group in self._groups(rests):
            rest_rows = [self._without_head(self.rows[index], lengths[index]) for index in group]
            batch, outputs = batch_rows(self.model, rest_rows), dict[str, CachedOutput]()
            inputs: dict[str, Any] = {"input_ids": batch.ids_RT, "attention_mask": batch.mask_RT}
            if prefix is not None:
                chosen = torch.tensor([head_R[index] for index in group], device=batch.ids_RT.device)
                inputs = prefix.select(chosen).inputs(batch.ids_RT, batch.mask_RT)
            with recording_outputs(self.model, self.fixed, outputs):
                hidden_RTD = decoder_of(self.model)(**inputs, use_cache=prefix is not None).last_hidden_state
            states_LD = select_positions(batch.row_L, batch.column_L)(hidden_RTD)[0]
            by_row = states_LD.split([len(row.labels) for row in rest_rows])
            self.tuple_lengths = [outputs[one.source].tuple_length for one in self.fixed]
            for position, (index, own) in enumerate(zip(group, by_row, strict=True)):
                self.states_before[index] = own.clone()
                for one in self.fixed:
                    rest = outputs[one.source].hidden[position, : rests[index]]
                    head = before[one.source].hidden[head_R[index], : lengths[index]] if before else rest[:0]
                    self.outputs[index].append(torch.cat([head, rest]))

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length that fit the memory together."""
        device = input_device(self.model)
        max_tokens = memory_budget(self.model) // bytes_per_token(self.model)
        for group in group_by_length(lengths, max_padding(device, lengths)):
            size = max(1, max_tokens // lengths[group[-1]])
            yield from (group[start : start + size] for start in range(0, len(group), size))

    @staticmethod
    def _without_head(row: LabeledRow, length: int) -> LabeledRow:
        return LabeledRow(row.ids[length:], [(column - length, token) for column, token in row.labels])

    @torch.no_grad()
    def logits_before(self, chosen: Sequence[int], tokens: TokenSelection) -> torch.Tensor:
        states_LD = torch.cat([self.states_before[index] for index in chosen])
        return at_least_float32(self.head.logits(states_LD, tokens))

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
