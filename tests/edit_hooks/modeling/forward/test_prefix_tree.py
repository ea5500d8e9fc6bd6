"""A prefix tree gives every row the logits and gradients that it has alone, on models that take one."""

from __future__ import annotations

import pytest
import torch

from edit_hooks.contract.subject import tiny_model
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.modeling.forward.prefix_tree import PrefixTree, TreeBatch, takes_trees

ROWS = [[3, 4, 5, 6], [3, 4, 7], [3, 4, 5, 6], [8, 4, 5], [3, 4, 7, 9, 10], [3]]


def test_nodes_are_shared_by_rows_that_begin_alike() -> None:
    tree = PrefixTree.of(ROWS)
    assert tree.ids == [3, 4, 5, 6, 7, 8, 4, 5, 9, 10]
    assert tree.depths == [0, 1, 2, 3, 2, 0, 1, 2, 3, 4]
    assert tree.nodes == [[0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 3], [5, 6, 7], [0, 1, 4, 8, 9], [0]]
    assert tree.shared == [0, 2, 4, 0, 3, 1]
    for row, nodes, shared in zip(ROWS, tree.nodes, tree.shared, strict=True):
        assert [tree.ids[node] for node in nodes] == row
        assert (
            nodes[shared:] == list(range(nodes[shared], nodes[shared] + len(row) - shared))
            if shared < len(row)
            else True
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_rows_of_trees_have_their_own_logits_and_gradients(family: str) -> None:
    """Two trees of different sizes in one batch."""
    model = tiny_model(family)
    assert takes_trees(model, 5)
    trees = [PrefixTree.of(ROWS), PrefixTree.of(ROWS[3:4])]
    embedded = model.get_input_embeddings().weight
    logits_RNV = model(**TreeBatch.of(trees, model).inputs(), use_cache=False).logits
    found = [logits_RNV[0, nodes] for nodes in trees[0].nodes] + [logits_RNV[1, trees[1].nodes[0]]]
    alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in [*ROWS, ROWS[3]]]
    for ours, own in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, own, atol=2e-5, rtol=1e-4)
    with torch.enable_grad():
        embedded.requires_grad_()
        losses = [
            torch.stack([logits.log_softmax(-1)[:, 7].sum() for logits in of_rows]).sum()
            for of_rows in (
                [
                    model(**TreeBatch.of(trees[:1], model).inputs(), use_cache=False).logits[0, nodes]
                    for nodes in trees[0].nodes
                ],
                [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS],
            )
        ]
        ours, own = (torch.autograd.grad(loss, embedded)[0] for loss in losses)
    embedded.requires_grad_(False)
    torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_models_without_such_masks_take_none(family: str) -> None:
    """Biases by distance from a mask of tokens; no attention at all."""
    assert not takes_trees(build_model(family), 5)


def test_rows_beyond_a_window_are_no_tree() -> None:
    model = tiny_model("gemma3_text")
    assert takes_trees(model, 8) and not takes_trees(model, 9)


def test_nothing_is_learned_from_nan() -> None:
    model = build_model("llama")
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        assert not takes_trees(model, 5)
        weight.copy_(kept)
    assert takes_trees(model, 5)
