"""ROME's closed-form update in float64: what it writes, and what the second moment does to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from editor_settings import ROME_CONFIG
from tiny_architectures import ARCHITECTURES
from value_problems import EDIT_REQUESTS, LIMIT, each_model, keep_wide, loaded, relative

from edit_hooks import edited, load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER, SENTENCES
from edit_hooks.locate.values.rows import TokenRow, rewriting_row
from edit_hooks.locate.values.value_optimization import ENGINES


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def rome(model_type: str, **config: Any):
    model, tokenizer = loaded(model_type)
    settings_ = {**ROME_CONFIG, "keep_intermediates": True, **config}
    return model, tokenizer, load_editor("rome", config=settings_).edit(model, tokenizer, EDIT_REQUESTS[:2])


def rewrite_output(model, tokenizer, row: TokenRow) -> torch.Tensor:
    """Output of the rewrite module at a row's fact token, from a plain forward."""
    outputs = {}
    module = model.get_submodule(ARCHITECTURES[model.config.model_type].rewrite_name(EDIT_LAYER))
    handle = module.register_forward_hook(lambda _m, _a, output: outputs.update(out=output[0, row.position].detach()))
    try:
        with torch.no_grad():
            model(torch.tensor([row.ids]))
    finally:
        handle.remove()
    return outputs["out"]


def spread(width: int) -> torch.Tensor:
    """A well-conditioned second moment that is far from the identity."""
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(4 * width, width, generator=generator, dtype=torch.float64)
    return draws.T @ draws / len(draws) + 0.1 * torch.eye(width, dtype=torch.float64)


@pytest.mark.parametrize("with_covariance", [False, True])
@pytest.mark.parametrize("key_mode", ["mixed", "prefixed", "prompt"])
@each_model
def test_the_edited_matrix_writes_the_value(model_type, key_mode, with_covariance):
    """W' k + b = v0 + delta for the key of the mode: the bare prompt's (run through the model), or the mean key."""
    width = loaded(model_type)[0].get_submodule(ARCHITECTURES[model_type].rewrite_name(EDIT_LAYER))
    width = max(width.weight.shape)
    moments = {EDIT_LAYER: spread(width)} if with_covariance else None
    # The closed form holds for any value, also for one that two steps found.
    model, tokenizer, deltas = rome(model_type, key_mode=key_mode, second_moments=moments, num_steps=2)
    module = model.get_submodule(ARCHITECTURES[model_type].rewrite_name(EDIT_LAYER))
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=False):
        target, row = delta.intermediates["v_star"], rewriting_row(tokenizer, request, "{}")
        rows = [rewriting_row(tokenizer, request, text) for text in CONTEXT_TEMPLATES]
        before = rewrite_output(model, tokenizer, row)
        assert relative(target, before + delta.intermediates["v_delta"]) < LIMIT
        with edited(model, delta), torch.no_grad():
            if key_mode == "prefixed":
                outputs = torch.stack([rewrite_output(model, tokenizer, one) for one in rows])
                assert relative(module(delta.intermediates["cur_input"]), target) < LIMIT
                assert relative(outputs.mean(0), target) < LIMIT
            else:
                assert relative(rewrite_output(model, tokenizer, row), target) < LIMIT
        (update,) = delta.weights().values()
        assert int(torch.linalg.matrix_rank(update)) == 1


@pytest.mark.parametrize("key_mode", ["mixed", "prefixed", "prompt"])
def test_only_the_direction_of_the_solved_key_matters(key_mode):
    """Scaling C scales C^-1 k and cancels; with the identity the update is proportional to r k^T."""
    identity = torch.eye(64, dtype=torch.float64)
    plain = rome("llama", key_mode=key_mode)[2]
    for scale in (1.0, 250.0):
        scaled = rome("llama", key_mode=key_mode, second_moments={EDIT_LAYER: scale * identity})[2]
        for ours, theirs in zip(scaled, plain, strict=True):
            (update,), (expected,) = ours.weights().values(), theirs.weights().values()
            assert relative(update, expected) < 1e-9
    for delta in plain:
        (update,) = delta.weights().values()
        key = delta.intermediates["k_star"]
        along = torch.outer(update @ key, key) / key.dot(key)
        assert relative(along, update) < 1e-9


def test_the_second_moment_turns_the_update_away_from_common_keys():
    """With C the update acts on C^-1 k, so a key that is common in text is disturbed less than without."""
    model, tokenizer = loaded("llama")
    module = model.get_submodule(ARCHITECTURES["llama"].rewrite_name(EDIT_LAYER))
    keys: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _m, args: keys.append(args[0][0].detach()))
    with torch.no_grad():
        for text in SENTENCES:
            model(torch.tensor([tokenizer(text)["input_ids"]]))
    handle.remove()
    stacked = torch.cat(keys)
    moment = stacked.T @ stacked / len(stacked)
    plain = rome("llama", key_mode="prompt")[2]
    turned = rome("llama", key_mode="prompt", second_moments={EDIT_LAYER: moment})[2]
    for ours, theirs in zip(turned, plain, strict=True):
        (update,), (other,) = ours.weights().values(), theirs.weights().values()
        assert (stacked @ update.T).norm() < 0.8 * (stacked @ other.T).norm()


@pytest.mark.parametrize("engine", ["fast", "reference"])
@each_model
def test_the_editor_uses_the_configured_engine(model_type, engine, monkeypatch):
    """Both settings reach their engine, and the deltas agree (float64)."""
    used = []

    def recorded(name, make_engine, *args):
        used.append(name)
        return make_engine(*args)

    for name, make_engine in list(ENGINES.items()):
        monkeypatch.setitem(ENGINES, name, functools.partial(recorded, name, make_engine))
    _, _, ours = rome(model_type, engine=engine, num_steps=2)
    assert set(used) == {engine}
    monkeypatch.undo()
    _, _, theirs = rome(model_type, engine="fast" if engine == "reference" else "reference", num_steps=2)
    for delta, other in zip(ours, theirs, strict=True):
        (update,), (expected,) = delta.weights().values(), other.weights().values()
        assert relative(update, expected) < LIMIT
