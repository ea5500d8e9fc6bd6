"""Suffixes on top of a kept prefix, read apart: as the model's own attention over joined keys and values.

Float64 and everything kept wide (see test_engine).
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from tiny import ALL_MODEL_TYPES, build_model
from transformers import DynamicCache
from value_problems import EDIT_REQUESTS, LIMIT, SETTINGS, KeepWide, each_model, loaded, problem, relative

from edit_hooks.locate.value_optimization import optimize_values
from edit_hooks.modeling import prefix_attention
from edit_hooks.modeling.architectures import decoder_of
from edit_hooks.modeling.prefix_attention import is_supported, kept_prefix
from edit_hooks.modeling.prefix_cache import keys_and_values

BEFORE = [[5, 6, 7, 8, 9, 10], [11, 12], []]  # unequal, and one row without any
SUFFIXES = torch.tensor([[20, 21, 22, 23], [24, 25, 26, 0], [27, 0, 0, 0]])
LENGTHS = torch.tensor([4, 3, 1])


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with KeepWide():
        yield


def run(model, way):
    """Last hidden states at real tokens, and the gradient of the suffix embeddings, joined or apart."""
    prefix = keys_and_values(model, BEFORE, share=False)
    before = torch.tensor([len(row) for row in BEFORE])
    columns = torch.arange(SUFFIXES.shape[1])
    mask = torch.cat([prefix.mask_RP, (columns < LENGTHS[:, None]).long()], 1)
    embeddings = model.get_input_embeddings()(SUFFIXES).detach().requires_grad_(True)
    arguments = {"attention_mask": mask, "position_ids": before[:, None] + columns, "use_cache": True}
    with way(model, prefix.entries) as cache:
        output = decoder_of(model)(inputs_embeds=embeddings, past_key_values=cache, **arguments).last_hidden_state
    real = output[columns < LENGTHS[:, None]]
    (gradient,) = torch.autograd.grad(real.square().sum(), embeddings)
    return real.detach(), gradient


class Joined:
    def __init__(self, _model, entries):
        self.entries = entries

    def __enter__(self):
        return DynamicCache(self.entries)

    def __exit__(self, *_error):
        return None


# GPT-J's attention cannot be chosen; sdpa cannot cap logits as Gemma 2 does.
WAYS = [
    (model_type, implementation)
    for model_type in ALL_MODEL_TYPES
    for implementation in ("sdpa", "eager")
    if model_type != "gptj" and (model_type, implementation) != ("gemma2", "sdpa")
]


@pytest.mark.parametrize(("model_type", "implementation"), WAYS)
def test_apart_equals_joined(model_type, implementation):
    model, _ = loaded(model_type)
    config = decoder_of(model).config
    own = config._attn_implementation
    try:
        config._attn_implementation = implementation
        joined, apart = run(model, Joined), run(model, kept_prefix)
    finally:
        config._attn_implementation = own
    for ours, theirs in zip(apart, joined, strict=True):
        assert relative(ours, theirs) < LIMIT


@torch.no_grad()
def test_one_token_that_sees_everything():
    """Where transformers would leave the mask out."""
    model, _ = loaded("llama")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected = decoder_of(model)(ids, use_cache=False).last_hidden_state[:, -1]
    prefix = keys_and_values(model, ids[:, :-1].tolist(), share=False)
    with kept_prefix(model, prefix.entries) as cache:
        found = decoder_of(model)(ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache)
    assert relative(found.last_hidden_state[:, -1], expected) < LIMIT


@each_model
def test_families_whose_attention_can_be_chosen(model_type):
    assert is_supported(loaded(model_type)[0]) == (model_type != "gptj")


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gptj"])
def test_the_engine_uses_it_where_it_can(model_type):
    model, tokenizer = loaded(model_type)
    with mock.patch.object(prefix_attention, "kept_prefix", wraps=kept_prefix) as used:
        optimize_values(model, [problem(tokenizer, EDIT_REQUESTS[0])], SETTINGS)
    assert bool(used.call_count) == (model_type != "gptj")


def test_the_models_own_attention_comes_back():
    model, _ = loaded("llama")
    own = model.config._attn_implementation
    with pytest.raises(KeyError, match="on purpose"), kept_prefix(model, []):
        assert model.config._attn_implementation == prefix_attention.NAME
        raise KeyError("on purpose")
    assert model.config._attn_implementation == own and not prefix_attention._kept


def test_an_attention_that_is_neither_eager_nor_sdpa_is_left_alone(monkeypatch):
    model = build_model("llama", dtype=torch.float64)
    assert is_supported(model)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert not is_supported(model)
