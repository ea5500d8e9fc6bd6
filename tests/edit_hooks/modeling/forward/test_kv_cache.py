"""Rows of different lengths in one batch: padding, and caches shifted to a common last column."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from value_problems import LIMIT, each_model, loaded, relative

from edit_hooks.modeling.forward.kv_cache import CACHE, right_aligned, right_padded, select_rows, shift_columns

ROWS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]


def test_padding_is_on_the_right_and_masked():
    ids, mask = right_padded([(1, 2, 3), [4], []], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_columns_are_taken_from_the_index_and_zero_where_it_is_negative():
    states = torch.arange(6.0).view(1, 1, 3, 2)
    assert shift_columns(states, torch.tensor([[-1, 2, 0]]))[0, 0].tolist() == [[0, 0], [4, 5], [0, 1]]


@torch.no_grad()
@pytest.mark.filterwarnings("error:.*deprecated:FutureWarning")
def test_the_cache_has_the_name_that_transformers_uses():
    model, _ = loaded("llama")
    output = model(torch.tensor(ROWS[:1]), use_cache=True)
    assert output[CACHE].get_seq_length() == len(ROWS[0])
    assert model(torch.tensor([[5]]), use_cache=True, **{CACHE: output[CACHE]})[CACHE].get_seq_length() == 6


@torch.no_grad()
@each_model
def test_an_aligned_cache_ends_with_the_keys_of_every_row(model_type):
    """Against every row alone; the mask marks its tokens, and selected rows keep their own."""
    model, _ = loaded(model_type)
    ids, mask = right_padded(ROWS, torch.device("cpu"))
    cache = DynamicCache()
    model(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE: cache})
    aligned = right_aligned(cache, mask.sum(1), ids.shape[1])
    assert aligned.mask_RT.sum(1).tolist() == [5, 1, 3] and aligned.mask_RT[:, -1].tolist() == [1, 1, 1]
    selected = select_rows(aligned.cache, torch.tensor([2]))
    for index, row in enumerate(ROWS):
        alone = DynamicCache()
        model(input_ids=torch.tensor([row]), use_cache=True, **{CACHE: alone})
        for layer, ours, one in zip(alone.layers, aligned.cache.layers, selected.layers, strict=True):
            assert relative(ours.keys[index, :, -len(row) :], layer.keys[0]) < LIMIT
            assert relative(ours.values[index, :, -len(row) :], layer.values[0]) < LIMIT
            assert torch.equal(one.keys[0], ours.keys[2])
