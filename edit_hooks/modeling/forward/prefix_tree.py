"""Rows that begin alike as one row: the nodes of their prefix tree, under a mask of ancestors.

A node is a token behind the same tokens in every row that has it. It attends to its ancestors and itself, at the
position that is its depth, so causal attention gives it the states that it has in each of its rows. Unlike a prefix
cache, the tree is one pass, through which gradients reach shared tokens, and every branching is shared.

Not every model takes such a mask: some compute positions, biases or windows from a mask of tokens. So each model is
tried once on a small tree (:func:`takes_trees`), and rows beyond a sliding window or an attention chunk form
no tree.

Shapes: R trees, N nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from edit_hooks.modeling.architectures import input_device, text_config
from edit_hooks.modeling.device.run_ahead import upload
from edit_hooks.modeling.forward.forward_pass import agree, probe_rows
from edit_hooks.modeling.hooks import frozen

PROBE_LENGTH, PROBE_SHARED = 7, 4  # tokens of the rows of the tree that a model is tried on, and how many both share
# Beyond as many tokens attention depends on more than the ancestors: keys of a config.
LIMITS = ("sliding_window", "attention_chunk_size", "window_size", "keep_window_size")


class PrefixTree(NamedTuple):
    """The prefix tree of some rows; the new nodes of a row are adjacent, in the order of the rows.

    Attributes:
        ids: the token of every node. depths: its position.
        nodes: by row the node of every token.
        shared: by row how many of its first tokens are nodes of earlier rows.
    """

    ids: list[int]
    depths: list[int]
    nodes: list[list[int]]
    shared: list[int]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> PrefixTree:
        tree, children = cls([], [], [], []), dict[tuple[int, int], int]()
        for row in rows:
            path: list[int] = []
            before = len(tree.ids)
            for depth, token in enumerate(row):
                node = children.setdefault((path[-1] if path else -1, token), len(tree.ids))
                if node == len(tree.ids):
                    tree.ids.append(token)
                    tree.depths.append(depth)
                path.append(node)
            tree.nodes.append(path)
            tree.shared.append(len(row) - (len(tree.ids) - before))
        return tree


class TreeBatch(NamedTuple):
    """Several trees as the inputs of a decoder.

    Attributes:
        ids_RN, position_RN: tokens and positions; nodes without a row are behind the others.
        mask_R1NN: what is added to the scores of attention.
    """

    ids_RN: torch.Tensor
    position_RN: torch.Tensor
    mask_R1NN: torch.Tensor

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], model: nn.Module) -> TreeBatch:
        device, width = input_device(model), max(len(tree.ids) for tree in trees)
        ids_RN, position_RN = (torch.zeros(len(trees), width, dtype=torch.long) for _ in range(2))
        seen_RNN = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
        for number, tree in enumerate(trees):
            ids_RN[number, : len(tree.ids)] = torch.tensor(tree.ids)
            position_RN[number, : len(tree.ids)] = torch.tensor(tree.depths)
            for path, shared in zip(tree.nodes, tree.shared, strict=True):
                nodes = torch.tensor(path)
                new = torch.ones(len(path) - shared, len(path), dtype=torch.bool).tril(shared)
                seen_RNN[number, nodes[shared:, None], nodes] = new
        dtype = next(model.parameters()).dtype
        dtype = dtype if dtype.is_floating_point else torch.float32
        mask_RNN = torch.zeros(seen_RNN.shape, dtype=dtype).masked_fill(~seen_RNN, torch.finfo(dtype).min)
        return cls(*(upload(one, device) for one in (ids_RN, position_RN, mask_RNN[:, None])))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of a model or decoder."""
        return {"input_ids": self.ids_RN, "position_ids": self.position_RN, "attention_mask": self.mask_R1NN}


_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def takes_trees(model: Any, longest: int) -> bool:
    """Whether a prefix tree of rows of at most this length gives the logits of each row alone."""
    config = text_config(model)
    limits = [getattr(config, name, None) for name in LIMITS]
    if any(limit is not None and longest > limit for limit in limits):
        return False
    if model not in _known:
        with frozen(model), torch.no_grad():
            found = _tried(model)
        if found is None:  # nothing is learned from NaN; the model without an edit may have numbers
            return False
        _known[model] = found
    return _known[model]


def _tried(model: Any) -> bool | None:
    """Whether a small tree has the logits of its rows; ``None`` if these have NaN."""
    first, second = probe_rows(model, (PROBE_LENGTH, PROBE_LENGTH))
    rows = [first, [*first[:PROBE_SHARED], *second[PROBE_SHARED:]]]
    tree = PrefixTree.of(rows)
    alone = [
        model(input_ids=torch.tensor([row], device=input_device(model)), use_cache=False).logits[0] for row in rows
    ]
    if any(bool(logits_TV.isnan().any()) for logits_TV in alone):
        return None
    try:
        logits_NV = model(**TreeBatch.of([tree], model).inputs(), use_cache=False).logits[0]
        return all(agree(logits_NV[nodes], own) for nodes, own in zip(tree.nodes, alone, strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model's code fails on a mask that it does not expect in whatever way
        return False
