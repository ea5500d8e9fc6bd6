"""Suffixes on top of a cached prefix: the same as the model's own attention over concatenated keys and values.

Float64, narrowed nowhere (`keep_wide`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, DynamicCache
from value_problems import EDIT_REQUESTS, LIMIT, SETTINGS, each_model, keep_wide, loaded, problem, relative

from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, build_model
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.modeling.architectures import decoder_of
from edit_hooks.modeling.forward import prefix_attention
from edit_hooks.modeling.forward.kv_cache import CACHE
from edit_hooks.modeling.forward.prefix_attention import cached_prefix, fused_attention, is_supported, with_room
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache

PREFIXES = [[5, 6, 7, 8, 9, 10], [11, 12], []]  # of unequal lengths, and one row without any
SUFFIXES = torch.tensor([[20, 21, 22, 23], [24, 25, 26, 0], [27, 0, 0, 0]])
LENGTHS = torch.tensor([4, 3, 1])


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def run(model, make_cache):
    """Last hidden states at real tokens, and the gradient of the suffix embeddings."""
    prefix = compute_prefix_cache(model, PREFIXES, share=False)
    prefix_length = torch.tensor([len(row) for row in PREFIXES])
    columns = torch.arange(SUFFIXES.shape[1])
    mask = torch.cat([prefix.mask_RP, (columns < LENGTHS[:, None]).long()], 1)
    embeddings = model.get_input_embeddings()(SUFFIXES).detach().requires_grad_(True)
    arguments = {"attention_mask": mask, "position_ids": prefix_length[:, None] + columns, "use_cache": True}
    with make_cache(model, prefix.layers) as cache:
        output = decoder_of(model)(inputs_embeds=embeddings, **{CACHE: cache}, **arguments).last_hidden_state
    real = output[columns < LENGTHS[:, None]]
    (gradient,) = torch.autograd.grad(real.square().sum(), embeddings)
    return real.detach(), gradient


def concatenated(_model, layers):
    """transformers' own cache, which appends the new keys and values."""
    return contextlib.nullcontext(DynamicCache(layers))


def fused(model, layers):
    """The form of a GPU: a prefix with room for the new tokens."""
    room = SUFFIXES.shape[1]
    return cached_prefix(model, with_room(layers, room), room)


# GPT-J's attention can be replaced from transformers 5.24 on.
NOT_REPLACEABLE = () if Version(transformers.__version__) >= Version("5.24") else ("gptj",)
# sdpa cannot cap logits as Gemma 2 does.
IMPLEMENTATIONS = [
    (model_type, implementation)
    for model_type in ALL_MODEL_TYPES
    for implementation in ("sdpa", "eager")
    if model_type not in NOT_REPLACEABLE and (model_type, implementation) != ("gemma2", "sdpa")
]


@pytest.mark.parametrize(("model_type", "implementation"), IMPLEMENTATIONS)
def test_a_separate_prefix_equals_a_concatenated_one(model_type, implementation):
    model, _ = loaded(model_type)
    config = decoder_of(model).config
    own = config._attn_implementation
    try:
        config._attn_implementation = implementation
        expected, ours = run(model, concatenated), (*run(model, cached_prefix), *run(model, fused))
    finally:
        config._attn_implementation = own
    for tensor, other in zip(ours, expected * 2, strict=True):
        assert relative(tensor, other) < LIMIT


@torch.no_grad()
@each_model
def test_rows_without_a_prefix_in_the_fused_form(model_type):
    model, _ = loaded(model_type)
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    expected = decoder_of(model)(ids, attention_mask=mask, use_cache=False).last_hidden_state
    with fused_attention(model):
        output = decoder_of(model)(ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert relative(output[mask.bool()], expected[mask.bool()]) < LIMIT


@torch.no_grad()
def test_one_token_that_sees_everything():
    """Where transformers would omit the mask."""
    model, _ = loaded("llama")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected = decoder_of(model)(ids, use_cache=False).last_hidden_state[:, -1]
    prefix = compute_prefix_cache(model, ids[:, :-1].tolist(), share=False)
    with cached_prefix(model, prefix.layers) as cache:
        output = decoder_of(model)(ids[:, -1:], attention_mask=torch.ones_like(ids), **{CACHE: cache})
    assert relative(output.last_hidden_state[:, -1], expected) < LIMIT


@torch.no_grad()
def test_models_in_two_threads_do_not_see_each_others_prefixes():
    """Both enter their prefix before either runs, and the first leaves before the second runs."""
    names = ("llama", "qwen2")
    ids = {"llama": torch.tensor([[5, 6, 7, 8, 9, 10]]), "qwen2": torch.tensor([[11, 12, 13]])}
    expected = {name: decoder_of(loaded(name)[0])(ids[name], use_cache=False).last_hidden_state for name in names}
    prefixes = {name: compute_prefix_cache(loaded(name)[0], ids[name][:, :-1].tolist()) for name in names}
    both_entered, first_left = threading.Barrier(2, timeout=60), threading.Event()
    hidden, errors = {}, []

    def work(name: str) -> None:
        try:
            with torch.no_grad(), keep_wide():
                model = loaded(name)[0]
                with cached_prefix(model, prefixes[name].layers) as cache:
                    both_entered.wait()
                    if name != names[0]:
                        assert first_left.wait(60)
                    mask = torch.ones_like(ids[name])
                    output = decoder_of(model)(ids[name][:, -1:], attention_mask=mask, **{CACHE: cache})
                    hidden[name] = output.last_hidden_state[:, -1]
        except Exception as error:  # reported by the main thread
            errors.append(error)
        finally:
            if name == names[0]:
                first_left.set()

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for name in names:
        assert relative(hidden[name], expected[name][:, -1]) < LIMIT


@each_model
def test_families_whose_attention_can_be_replaced(model_type):
    model, _ = loaded(model_type)
    is_without_cap = (
        model_type == "gemma2" and model.config._attn_implementation == "sdpa"
    )  # transformers 5.17, not 5.24
    assert is_supported(model) == (model_type not in NOT_REPLACEABLE and not is_without_cap)


@pytest.mark.parametrize("model_type", ["gemma2", "llama"])
def test_sdpa_is_not_replaced_where_it_leaves_out_the_cap_of_the_scores(model_type, monkeypatch):
    model = build_model(model_type, dtype=torch.float64)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "sdpa")
    assert is_supported(model) == (model_type == "llama")


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gptj"])
def test_the_fast_engine_uses_it_where_it_is_supported(model_type):
    model, tokenizer = loaded(model_type)
    with mock.patch.object(prefix_attention, "cached_prefix", wraps=cached_prefix) as used:
        optimize_values(model, [problem(tokenizer, EDIT_REQUESTS[0])], SETTINGS)
    assert bool(used.call_count) == (model_type not in NOT_REPLACEABLE)


def test_the_models_own_attention_is_restored_after_an_error():
    model, _ = loaded("llama")
    own = model.config._attn_implementation
    with pytest.raises(KeyError, match="on purpose"), cached_prefix(model, []):
        assert model.config._attn_implementation == prefix_attention.NAME
        raise KeyError("on purpose")
    assert model.config._attn_implementation == own


def test_the_attention_is_registered_at_first_use(monkeypatch):
    """Not at import, and again after somebody removed it."""
    table = {name: value for name, value in AttentionInterface._global_mapping.items() if name != prefix_attention.NAME}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", table)
    with cached_prefix(loaded("llama")[0], []):
        assert table[prefix_attention.NAME] is prefix_attention._attend


def test_other_attention_implementations_are_not_replaced(monkeypatch):
    model = build_model("llama", dtype=torch.float64)
    assert is_supported(model)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert not is_supported(model)


@pytest.mark.parametrize(("dtype", "size", "bias"), [(torch.bfloat16, 6.0, 0.0), (torch.float16, 26.0, 39.0)])
def test_16_bits_are_as_accurate_as_the_models_own_attention(dtype, size, bias):
    """Products of queries and keys are in the thousands; with biases as those of Qwen2 float16 cannot hold them."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, groups, new, known, width = 2, 8, 2, 4, 20, 128

    def draw(*shape, scale=1.0, shift=0.0):
        return (torch.randn(*shape, generator=generator) * scale + shift).to(dtype)

    shift = bias * torch.randn(width, generator=generator).sign()
    query = draw(rows, heads, new, width, scale=size, shift=shift)
    keys = draw(rows, groups, known + new, width, scale=size, shift=shift)
    values = draw(rows, groups, known + new, width)
    mask = torch.ones(new, known + new).tril(known).bool()
    repeated = [states.repeat_interleave(heads // groups, 1) for states in (keys, values)]

    def own_attention(*states):
        return torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask)

    exact = own_attention(*(states.double() for states in (query, *repeated)))
    suffix_keys = keys[:, :, known:].clone()
    setattr(suffix_keys, prefix_attention.PREFIX, (keys[:, :, :known], values[:, :, :known]))
    attended, _ = prefix_attention._attend(
        None, query, suffix_keys, values[:, :, known:], mask.expand(rows, 1, new, known + new)
    )
    together, _ = prefix_attention._attend_fused(None, query, keys, values, mask.expand(rows, 1, new, known + new))
    error = max(relative(states.transpose(1, 2).double(), exact) for states in (attended, together))
    # The weights of the values are rounded once more than there.
    assert error < 2 * relative(own_attention(query, *repeated).double(), exact) < 0.01
