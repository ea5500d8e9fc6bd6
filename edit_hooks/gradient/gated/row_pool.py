"""Logits at the labels of chosen rows, of a fixed set of rows, while some linear maps are trained.

A step of a trainer may need a few rows of many: those that it draws. :class:`CachedPool` runs every row once before
the training. It keeps the states that do not depend on the trained maps, and runs the chosen rows from there. What
rows begin with is computed once, also in a step: they are one prefix tree where the model takes one
(:mod:`edit_hooks.modeling.forward.prefix_tree`), else padded. :class:`PlainPool` runs every row alone through the whole
model.

Several edits may train side by side, each with its own weights: the rows of one call are given by edit, as many for
each, and stay adjacent, as :class:`~edit_hooks.gradient.weight_copies.WeightCopies` requires. Shapes: L labels of an
edit's chosen rows, W selected tokens, R rows or trees, T columns or nodes, d residual width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from edit_hooks.gradient.label_forward import CachedLabelForward, fixed_modules, recording_outputs
from edit_hooks.gradient.labeled_rows import LabeledRow, LabeledRows, batch_rows
from edit_hooks.gradient.side_by_side import memory_budget
from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding
from edit_hooks.modeling.forward.lm_head import ModelHead, TokenSelection, select_tokens
from edit_hooks.modeling.forward.prefix_tree import PrefixTree, TreeBatch, takes_trees
from edit_hooks.modeling.hooks import CachedOutput, select_positions
from edit_hooks.modeling.memory import bytes_per_token
from edit_hooks.modeling.tensors import at_least_float32

TREE_TOKENS = 512  # of the rows of a tree before the training: attention grows with their square


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


class Bundle(NamedTuple):
    """Rows as a batch: padded, or as prefix trees.

    Attributes:
        batch: the inputs, and the labels of all rows in their order.
        places: by row its row or tree in the batch, and the column or node of every token.
        shared: by row how many of its first tokens are nodes of an earlier row of its tree.
    """

    batch: LabeledRows
    places: list[tuple[int, torch.Tensor]]
    shared: list[int]

    @classmethod
    def padded(cls, model: Any, rows: Sequence[LabeledRow]) -> Bundle:
        batch = batch_rows(model, rows)
        places = [(number, torch.arange(len(row.ids))) for number, row in enumerate(rows)]
        return cls(batch, places, [0] * len(rows))

    @classmethod
    def of_trees(cls, model: Any, groups: Sequence[Sequence[LabeledRow]]) -> Bundle:
        """A tree per group of rows; the rows of the bundle are those of the groups one after another."""
        trees = [PrefixTree.of([row.ids for row in group]) for group in groups]
        inputs = TreeBatch.of(trees, model)
        places = [(number, torch.tensor(nodes)) for number, tree in enumerate(trees) for nodes in tree.nodes]
        labels = [
            (number, nodes[column], token)
            for number, (tree, group) in enumerate(zip(trees, groups, strict=True))
            for nodes, row in zip(tree.nodes, group, strict=True)
            for column, token in row.labels
        ]
        batch = LabeledRows.of(inputs.ids_RN, inputs.mask_R1NN, labels, inputs.position_RN)
        return cls(batch, places, [length for tree in trees for length in tree.shared])

    def spread(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """States [T, ...] of every row as those of the batch, [R, T, ...]."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.batch.ids_RT]
        for own, (number, _), shared in zip(states, self.places, self.shared, strict=True):
            parts[number].append(own[shared:])
        return nn.utils.rnn.pad_sequence([torch.cat(own) for own in parts], batch_first=True)


class CachedPool:
    """Chosen rows from their cached states on, with the selected logits only.

    A tree per edit, or rows in two groups of similar length.
    """

    def __init__(self, model: Any, rows: Sequence[LabeledRow], trained: Sequence[str]) -> None:
        self.model, self.rows, self.trained = model, rows, trained
        self.head = ModelHead(model)
        self.fixed = fixed_modules(model, trained)
        self.as_trees = takes_trees(model, max(len(row.ids) for row in rows))
        self.outputs: list[list[torch.Tensor]] = [[] for _ in rows]  # by row, the [T, ...] of every fixed module
        self.tuple_lengths: list[int | None] = []
        self.states_before: list[torch.Tensor] = [torch.empty(0) for _ in rows]  # by row, the [L, d] of the head
        self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """Run every row once."""
        for order, bundle in self._bundles():
            batch, outputs = bundle.batch, dict[str, CachedOutput]()
            with recording_outputs(self.model, self.fixed, outputs):
                hidden_RTD = decoder_of(self.model)(**batch.inputs(), use_cache=False).last_hidden_state
            states_LD = select_positions(batch.row_L, batch.column_L)(hidden_RTD)[0]
            by_row = states_LD.split([len(self.rows[index].labels) for index in order])
            self.tuple_lengths = [outputs[one.source].tuple_length for one in self.fixed]
            for index, own, (number, columns) in zip(order, by_row, bundle.places, strict=True):
                self.states_before[index] = own.clone()
                self.outputs[index] = [outputs[one.source].hidden[number, columns] for one in self.fixed]

    def _bundles(self) -> Iterator[tuple[list[int], Bundle]]:
        """All rows in bundles that fit the memory, with their indices."""
        units = self._tree_groups() if self.as_trees else [[index] for index in range(len(self.rows))]
        lengths = [sum(len(self.rows[index].ids) for index in unit) for unit in units]
        device = input_device(self.model)
        max_tokens = memory_budget(self.model) // bytes_per_token(self.model)
        for group in group_by_length(lengths, max_padding(device, lengths)):
            size = max(1, max_tokens // lengths[group[-1]])
            for start in range(0, len(group), size):
                chosen = [units[position] for position in group[start : start + size]]
                rows = [[self.rows[index] for index in unit] for unit in chosen]
                order = list(itertools.chain.from_iterable(chosen))
                if self.as_trees:
                    yield order, Bundle.of_trees(self.model, rows)
                else:
                    yield order, Bundle.padded(self.model, list(itertools.chain.from_iterable(rows)))

    def _tree_groups(self) -> list[list[int]]:
        """Rows that begin alike next to one another, in trees of at most :data:`TREE_TOKENS` tokens of rows."""
        groups: list[list[int]] = []
        room = 0
        for index in sorted(range(len(self.rows)), key=lambda index: self.rows[index].ids):
            room -= len(self.rows[index].ids)
            if not groups or room < 0:
                groups.append([])
                room = TREE_TOKENS - len(self.rows[index].ids)
            groups[-1].append(index)
        return groups

    @torch.no_grad()
    def logits_before(self, chosen: Sequence[int], tokens: TokenSelection) -> torch.Tensor:
        states_LD = torch.cat([self.states_before[index] for index in chosen])
        return at_least_float32(self.head.logits(states_LD, tokens))

    def logits(self, chosen: Sequence[Sequence[int]], tokens: Sequence[TokenSelection]) -> list[torch.Tensor]:
        states_LD = self._tree_states(chosen) if self.as_trees else self._padded_states(chosen)
        return [
            at_least_float32(self.head.logits(own_LD, selected))
            for own_LD, selected in zip(states_LD, tokens, strict=True)
        ]

    def _tree_states(self, chosen: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """Inputs [L, d] of the head at the labels of every edit's rows, which are one tree."""
        groups = [[self.rows[index] for index in of_edit] for of_edit in chosen]
        bundle = Bundle.of_trees(self.model, groups)
        counts = [sum(len(row.labels) for row in group) for group in groups]
        return self._states(bundle, list(itertools.chain.from_iterable(chosen))).split(counts)

    def _padded_states(self, chosen: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        """As :meth:`_tree_states`; the longest rows of every edit are one batch, the others another one."""
        lengths = [[len(self.rows[index].ids) for index in of_edit] for of_edit in chosen]
        longest_first = [sorted(range(len(own)), key=own.__getitem__, reverse=True) for own in lengths]
        cut = self._best_cut([sorted(own, reverse=True) for own in lengths])
        states: list[dict[int, torch.Tensor]] = [{} for _ in chosen]  # by edit and position among its chosen rows
        for part in (slice(0, cut), slice(cut, None)):
            places = [(edit, position) for edit, order in enumerate(longest_first) for position in order[part]]
            if places:
                indices = [chosen[edit][position] for edit, position in places]
                rows = [self.rows[index] for index in indices]
                found = self._states(Bundle.padded(self.model, rows), indices).split([len(row.labels) for row in rows])
                for (edit, position), states_LD in zip(places, found, strict=True):
                    states[edit][position] = states_LD
        return [torch.cat([own[position] for position in sorted(own)]) for own in states]

    @staticmethod
    def _best_cut(lengths: Sequence[Sequence[int]]) -> int:
        """How many of the longest rows of every edit form the first group, so that both have the fewest tokens."""
        width = [max(at_rank) for at_rank in itertools.zip_longest(*lengths, fillvalue=0)]
        costs = [cut * width[0] + (len(width) - cut) * width[cut] for cut in range(len(width))]
        return costs.index(min(costs))

    def _states(self, bundle: Bundle, indices: Sequence[int]) -> torch.Tensor:
        """Inputs [L, d] of the head at the labels of all rows of a bundle."""
        columns = zip(*(self.outputs[index] for index in indices), strict=True)
        outputs = [
            CachedOutput(bundle.spread(states), tuple_length)
            for states, tuple_length in zip(columns, self.tuple_lengths, strict=True)
        ]
        return CachedLabelForward(self.model, bundle.batch, self.trained, outputs).label_states()


POOLS: dict[str, type[PlainPool] | type[CachedPool]] = {"fast": CachedPool, "reference": PlainPool}
