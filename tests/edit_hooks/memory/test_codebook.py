"""Codebooks: replaced positions, look-ups, and combining the steps of a stream."""

from __future__ import annotations

import pytest
import torch
from random_deltas import codebook

from edit_hooks import EditingError
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.memory.codebook import NO_ENTRY, CodebookHooks, distances, replaced_positions


def test_each_policy_replaces_its_positions():
    context = ForwardContext.for_prefill(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), torch.tensor([3, 2]))
    positions = {
        policy: replaced_positions(policy, context).int().tolist()
        for policy in ("replace_last", "replace_prompt", "replace_all")
    }
    assert positions["replace_last"] == [[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    assert positions["replace_prompt"] == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert positions["replace_all"] == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_the_distance_of_equal_vectors_is_zero():
    """The expanded square would leave a rounding error, which decides at a radius of zero."""
    keys = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 1e3
    assert distances(keys, keys).diagonal().tolist() == [0.0] * 5
    assert distances(keys.bfloat16(), keys.bfloat16()).dtype == torch.float32


def test_the_nearest_key_decides_and_its_own_radius_counts(tiny_model):
    model = tiny_model("llama")
    hook_edit = codebook(model, num_entries=3)
    width = hook_edit.tensors["keys"].shape[1]
    hook_edit.tensors["keys"] = torch.stack([torch.full((width,), value) for value in (0.0, 1.0, 5.0)])
    hook_edit.tensors["radii"] = torch.tensor([1.0, 0.2, 1.0]) * width**0.5
    hooks = CodebookHooks(model, [hook_edit])
    queries = torch.stack([torch.full((width,), value) for value in (0.4, 0.9, 0.7, 4.5, 3.0)])
    assert hooks._look_up(0, queries).tolist() == [0, 1, NO_ENTRY, 2, NO_ENTRY]


def test_later_steps_replace_entries_and_add_new_ones(tiny_model):
    model = tiny_model("llama")
    first, second = codebook(model, num_entries=2), codebook(model, num_entries=2, first=1, seed=1)
    second.settings |= {"labels": [[7], [8]], "num_before": 2}
    book = HookEdit.combine([first, second])
    assert book.tensors["index"].tolist() == [0, 1, 2] and book.settings["labels"] == [[0], [7], [8]]
    assert torch.equal(book.tensors["values"][0], first.tensors["values"][0])
    assert torch.equal(book.tensors["values"][1:], second.tensors["values"])


def test_a_codebook_of_another_width_is_refused(tiny_model):
    model = tiny_model("llama")
    hook_edit = codebook(model)
    hook_edit.tensors["keys"] = torch.ones(1, 3)
    with pytest.raises(EditingError, match="maps 3 ->"):
        hook_edit.check(model)
