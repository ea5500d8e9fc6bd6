"""Chosen rows from their cached states on are the rows alone through the whole model."""

from __future__ import annotations

import pytest
import torch

from edit_hooks.contract.subject import tiny_model
from edit_hooks.gradient.gated.row_pool import Bundle, CachedPool, PlainPool
from edit_hooks.gradient.label_forward import ENGINES
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows
from edit_hooks.gradient.weight_copies import WeightCopies
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, TokenSelection
from edit_hooks.modeling.forward.prefix_tree import takes_trees

ROWS = [
    LabeledRow(list(range(3, 3 + length)), [(length - 1, 7), *([(length - 2, 9)] if length % 2 else [])])
    for length in (9, 4, 5, 12, 3, 8)
]


@pytest.mark.parametrize(("family", "as_trees"), [("gpt2", True), ("gemma3_text", False)])
def test_the_cached_pool_is_the_plain_one(family: str, as_trees: bool) -> None:
    """Two edits with weights of their own; every call has other rows, in any order.

    The rows of Gemma are longer than its window, so they are padded.
    """
    model = tiny_model(family)
    names = [architecture_of(model).rewrite_name(layer) for layer in (1, 2)]
    pools = CachedPool(model, ROWS, names), PlainPool(model, ROWS, names)
    assert isinstance(pools[0], CachedPool) and pools[0].as_trees == as_trees
    copies = WeightCopies(model, names, train_bias=False, num_edits=2)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in copies.leaves.values():
            leaf += torch.randn(leaf.shape, generator=noise) * 0.1
    tokens: list[TokenSelection] = [torch.tensor([7, 9, 30]), WHOLE_VOCAB]
    for chosen in ([[3, 1], [4, 0]], [[2, 2], [5, 3]], [[1], [3]]):
        with copies.used_by_model():
            found = pools[0].logits(chosen, tokens)
        expected = []
        for edit, rows in enumerate(chosen):
            own = WeightCopies(model, names, train_bias=False)
            with torch.no_grad():
                for name, leaf in own.leaves.items():
                    leaf.copy_(copies.leaves[name][edit : edit + 1])
            with own.used_by_model():
                expected += pools[1].logits([rows], tokens[edit : edit + 1])
        for ours, plain in zip(found, expected, strict=True):
            assert ours.shape == plain.shape
            torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)
    assert found[0].requires_grad


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_rows_begin_with_is_computed_once(family: str) -> None:
    """The states before the training, and those from which the training goes on."""
    model = tiny_model(family)
    assert takes_trees(model, 23)  # tried before the tokens are counted
    names = [architecture_of(model).rewrite_name(1)]
    begin = list(range(3, 23))
    rows = [LabeledRow([*begin, *end], [(len(begin) + len(end) - 1, 7), (19, 9)]) for end in ([2], [4, 5, 6], [])]
    rows = [rows[0], ROWS[1], rows[1], LabeledRow([40, 41, 42], [(2, 5)]), rows[2]]
    shapes: list[torch.Size] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: shapes.append(args[0].shape)
    )
    cached, plain = CachedPool(model, rows, names), PlainPool(model, rows, names)
    chosen: list[int] = [4, 0, 3, 1, 2]
    cached.logits([chosen], [WHOLE_VOCAB])
    handle.remove()
    assert [shape.numel() for shape in shapes] == [20 + 1 + 3 + 3] * 2  # row 1 is the beginning of the others
    for tokens in (WHOLE_VOCAB, torch.tensor([7, 9, 30])):
        found, expected = cached.logits_before(chosen, tokens), plain.logits_before(chosen, tokens)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(cached.logits([chosen], [tokens])[0], expected, atol=2e-5, rtol=1e-4)
    assert not found.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tree_of_a_batch_goes_on_without_the_others(engine: str) -> None:
    """With its own positions and mask."""
    model = tiny_model("llama")
    rows = [LabeledRow([3, 4, *end], [(1 + len(end), 7)]) for end in ([2], [4, 5, 6], [9, 8])]
    names = [architecture_of(model).rewrite_name(1)]
    batch = Bundle.of_trees(model, [rows[:1], rows[1:]]).batch
    forward = ENGINES[engine](model, batch, names)
    whole_L = forward.nll()
    forward.select(torch.tensor([False, True]))
    torch.testing.assert_close(forward.nll(), whole_L[1:], atol=2e-5, rtol=1e-4)
    plain = ENGINES["reference"](model, batch_rows(model, rows), names)
    torch.testing.assert_close(whole_L, plain.nll(), atol=2e-5, rtol=1e-4)


def test_the_cut_has_the_fewest_tokens() -> None:
    assert CachedPool._best_cut([[20, 19, 5, 4], [21, 18, 6, 2]]) == 2  # 2 * 21 + 2 * 6 tokens per edit
    assert CachedPool._best_cut([[7, 7, 7]]) == 0  # one group
