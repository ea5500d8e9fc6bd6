"""Low-rank updates with fewer ranks, and what a rank means for a serving engine."""

from __future__ import annotations

import pytest
import torch
from exported import build
from hypothesis import given, settings
from hypothesis import strategies as st
from random_deltas import random_delta

from edit_hooks import Delta, EditingError
from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.saving.truncation import VLLM_RANKS, adapter_name, editor_of, rank_of_edit, truncated, vllm_words


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_no_other_update_of_that_rank_is_nearer(given_rank: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(width, given_rank, generator=generator) for width in (5, 7))
    (kept, errors) = truncated(Delta(factors={"map": Factor(left, right)}), rank)
    update, nearest = left @ right.T, kept.factors["map"].update()
    values = torch.linalg.svdvals(update.double())
    bound = values[rank:].norm()
    assert kept.factors["map"].left.shape[1] <= max(rank, min(given_rank, rank))
    torch.testing.assert_close((update - nearest).double().norm(), bound, rtol=1e-4, atol=1e-5)
    assert errors["map"] == pytest.approx(float(bound / values.norm()), abs=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_maps_that_are_small_enough_stay_as_they_are(model_type):
    model, _ = build(model_type)
    delta = random_delta(model, layers=(0, EDIT_LAYER), ranks=(1, 6))
    kept, errors = truncated(delta, 3)
    first, second = delta.factors
    assert kept.factors[first] is delta.factors[first] and errors[first] == 0
    assert kept.factors[second].transposed == (model_type == "gpt2") and 0 < errors[second] < 1
    assert (rank_of_edit(delta), rank_of_edit(kept)) == (6, 3)


def test_dense_updates_are_refused():
    with pytest.raises(EditingError, match="dense"):
        truncated(Delta(dense={"map.weight": torch.ones(3, 3)}), 1)


def test_a_rank_beyond_the_map_counts_as_the_maps():
    assert rank_of_edit(Delta(factors={"map": Factor(torch.ones(5, 40), torch.ones(7, 40))})) == 5


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (5, "within vLLM's default limit of 16"),
        (16, "within vLLM's default limit"),
        (17, "needs --max-lora-rank 32"),
        (300, "needs --max-lora-rank 320"),
        (512, "needs --max-lora-rank 512"),
        (513, "up to rank 512; export with --rank 512"),
    ],
)
def test_the_option_of_vllm_is_named(rank, words):
    assert words in vllm_words(rank) and VLLM_RANKS[-1] == 512


def test_adapters_are_named_by_content():
    model, _ = build("llama")
    first, second = random_delta(model), random_delta(model, seed=1)
    names = [adapter_name(editor_of(delta.meta), delta.checksum()) for delta in (first, random_delta(model), second)]
    assert names[0] == names[1] != names[2] and names[0].startswith("test-")
    assert editor_of({"parts": [{"editor": "rome"}, {"editor": "rome"}]}) == "rome"
    assert editor_of({"parts": [{"editor": "rome"}, {"editor": "memit"}]}) is None
