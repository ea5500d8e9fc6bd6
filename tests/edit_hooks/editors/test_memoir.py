"""The residual memory of MEMOIR: columns of an edit, decay, prompts below the threshold, the same prompt twice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hook_edits import EDIT_REQUESTS, loaded, make, nll, stream_of

from edit_hooks import Delta, EditingError, edited
from edit_hooks.editors.memoir import clipped
from edit_hooks.memory import column_memory
from edit_hooks.memory.column_memory import ColumnMemory
from edit_hooks.memory.steps import STEP_NUMBERS

FIRST, SECOND = EDIT_REQUESTS[:2]


def test_other_columns_shrink_by_weight_decay_alone():
    model, tokenizer = loaded("llama")
    steps = stream_of("memoir", model, tokenizer, [FIRST, SECOND], weight_decay=0.01, top_k=18)
    first, both = (ColumnMemory.of(edit.hook_edit) for edit in (steps[0], Delta.summed(steps)))
    apart = first.columns_K[~torch.isin(first.columns_K, steps[1].hook_edit.tensors["columns"])]
    assert 0 < len(apart) < len(first.columns_K)
    assert steps[1].hook_edit.settings["decay"] == pytest.approx(0.99 ** steps[1].diagnostics["steps"])
    torch.testing.assert_close(both.at(apart), first.at(apart) * steps[1].hook_edit.settings["decay"])


def test_the_permutation_moves_the_columns_and_their_number_is_top_k():
    model, tokenizer = loaded("llama")
    one, other = (make("memoir", top_k=7, seed=seed).edit(model, tokenizer, [FIRST])[0] for seed in (0, 1))
    columns = [set(edit.hook_edit.tensors["columns"].tolist()) for edit in (one, other)]
    assert len(columns[0]) == len(columns[1]) == 7 and columns[0] != columns[1]


def test_long_gradients_are_clipped_to_norm_one():
    """Those of the released runs on tiny models are shorter, so no golden number shows it."""
    long, short = torch.full((2, 8), 3.0), torch.full((2, 8), 0.1)
    torch.testing.assert_close(clipped(long), torch.full((2, 8), 0.25))
    assert torch.equal(clipped(short), short)


def test_a_prompt_below_the_threshold_is_unedited():
    model, tokenizer = loaded("llama")
    (delta,) = make("memoir", threshold=1.0).edit(model, tokenizer, [FIRST])
    with torch.no_grad():
        for text, same in (("You can see.", True), (FIRST.text, False)):
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            plain = model(ids).logits
            with edited(model, delta):
                assert torch.equal(model(ids).logits, plain) is same


def test_a_prompt_that_is_edited_again_keeps_its_mask():
    model, tokenizer = loaded("llama")
    changed = dataclasses.replace(FIRST, target_new=SECOND.target_new)
    steps = stream_of("memoir", model, tokenizer, [FIRST, SECOND, changed])
    total = Delta.summed(steps)
    assert len(total.hook_edit.tensors["masks"]) == 2 == steps[2].diagnostics["num_masks"]
    before = Delta.summed(steps[:2])
    assert nll(model, tokenizer, changed, total) < nll(model, tokenizer, changed, before) - 0.05


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": 10.0, "weight_decay": 0.2}, "their product can be at most 1"),
        ({"background_texts": []}, "'background_texts' is empty"),
        ({"layers": [0, 1]}, "memory of a single map"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, named):
    with pytest.raises(EditingError, match=named):
        make("memoir", **settings)


def test_columns_and_permutations_that_the_map_lacks_are_refused():
    model, tokenizer = loaded("llama")
    with pytest.raises(EditingError, match="'top_k' is 4000"):
        make("memoir", top_k=4000).edit(model, tokenizer, [FIRST])
    width = model.get_submodule("model.layers.1.mlp.down_proj").in_features
    given = {"permutation": torch.zeros(width), "background": torch.zeros(width)}
    with pytest.raises(EditingError, match="permutation in 'given'"):
        make("memoir", given=given).edit(model, tokenizer, [FIRST])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seed": 7}, r"permutation \(seed\)"),
        ({"top_k": 16}, "top_k"),
        ({"feature": "mean"}, "feature"),
        ({"background_texts": ["The train leaves."]}, "background"),
    ],
)
def test_steps_that_select_in_another_way_are_refused(settings, named):
    """Prompts of the earlier edits would look for their masks among other columns."""
    model, tokenizer = loaded("llama")
    (first,) = make("memoir").edit(model, tokenizer, EDIT_REQUESTS[:1], measure=False)
    other = make("memoir", **settings)
    with pytest.raises(EditingError, match=f"in different ways: {named}"):
        other.edit(model, tokenizer, EDIT_REQUESTS[1:2], history=[first], measure=False)
    (second,) = make("memoir").edit(model, tokenizer, EDIT_REQUESTS[1:2], history=[first], measure=False)
    (apart,) = other.edit(model, tokenizer, EDIT_REQUESTS[1:2], measure=False)
    apart.hook_edit.settings |= {name: second.hook_edit.settings[name] for name in STEP_NUMBERS}
    with pytest.raises(EditingError, match=f"in different ways: {named}"):
        Delta.summed([first, apart])


@pytest.mark.parametrize("at_once", [1, 30, 10**6])
def test_overlaps_with_many_masks_are_taken_in_parts(at_once, monkeypatch):
    """Ten columns, masks of three: shares by counting, whatever is held at once."""
    monkeypatch.setattr(column_memory, "MAX_ENTRIES", at_once)
    masks = torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(n))[:3] for n in range(7)])
    counted = [[len(set(a) & set(b)) / 3 for b in masks.tolist()] for a in masks[:2].tolist()]
    torch.testing.assert_close(column_memory.overlaps(masks[:2], masks, 10), torch.tensor(counted))
