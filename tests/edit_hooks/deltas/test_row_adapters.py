"""Per-row adapters, against edits written into the weights."""

from __future__ import annotations

import pytest
import torch
from random_deltas import dense_delta, masked_delta, random_delta
from state import assert_same_state

from edit_hooks import EditingError, PerRowAdapters, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8], [5, 6, 7, 8]])


def patched_logits(model, delta, ids):
    with torch.no_grad(), edited(model, *([] if delta is None else [delta])):
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_each_row_has_its_own_edit(model_type, tiny_model):
    """Other ranks and modules per row, and no edit."""
    model = tiny_model(model_type)
    deltas = [random_delta(model, seed=1), random_delta(model, layers=(0, 1), ranks=(1, 4)), None]
    deltas.append(random_delta(model, seed=2))
    before = snapshot(model)
    with torch.no_grad(), PerRowAdapters(model, deltas):
        together = model(IDS).logits
    assert_same_state(before, snapshot(model))
    for ids, delta, logits in zip(IDS, deltas, together, strict=True):
        torch.testing.assert_close(logits, patched_logits(model, delta, ids), atol=2e-4, rtol=2e-4)
    assert not torch.allclose(together[0], together[2], atol=1e-2)


def test_selected_rows_keep_their_edits(tiny_model):
    model = tiny_model("llama")
    deltas = [random_delta(model, seed=seed) for seed in range(3)]
    adapters = PerRowAdapters(model, deltas)
    rows = torch.tensor([2, 0, 2])
    with torch.no_grad(), adapters.select(rows):
        selected = model(IDS[:1].expand(3, -1)).logits
    with torch.no_grad(), adapters:
        together = model(IDS[:1].expand(3, -1)).logits
    torch.testing.assert_close(selected, together[rows], atol=1e-5, rtol=1e-5)


def test_selecting_inside_the_scope_leaves_its_hooks_alone(tiny_model):
    model = tiny_model("llama")
    before = snapshot(model)
    with PerRowAdapters(model, [random_delta(model)]) as adapters:
        with adapters.select(torch.tensor([0])):
            pass
        assert model.get_submodule("model.layers.1.mlp.down_proj")._forward_hooks
    assert_same_state(before, snapshot(model))


def test_dense_and_masked_edits_are_refused(tiny_model):
    model = tiny_model("llama")
    for delta in (dense_delta(model), masked_delta(model)):
        with pytest.raises(EditingError, match="only low-rank edits"):
            PerRowAdapters(model, [None, delta])
