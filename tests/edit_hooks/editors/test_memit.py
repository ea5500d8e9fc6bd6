"""MEMIT: residuals and their spreading, engines, norms after the MLP, and settings."""

from __future__ import annotations

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from layered_edits import (
    EDIT_REQUESTS,
    LAYERS,
    covariance,
    each_model,
    each_normalized,
    largest_difference,
    load_memit_like,
    load_wide,
    rounding_bound,
    update_as_map,
)
from state import assert_same_state
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditingError, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model
from edit_hooks.locate.values.key_reader import read_rows
from edit_hooks.locate.values.rows import rewriting_row


@each_model
def test_a_vanishing_ridge_writes_the_whole_residual(model_type):
    """One layer, the bare prompt only, lambda near zero: h^L goes to z, through the norm where there is one."""
    model, tokenizer = load_wide(model_type)
    editor = load_memit_like("memit", model_type, layers=[EDIT_LAYER], context_templates=["{}"], moment_weight=1e-9)
    before = snapshot(model, tokenizer)
    for delta in editor.edit(model, tokenizer, EDIT_REQUESTS):
        # Norms compute in float32 under every model dtype and add an epsilon that the mapping leaves out.
        limit = 1e-4 if ARCHITECTURES[model_type].normalizes_mlp_output else 1e-8
        assert delta.diagnostics["distance_left"] < max(rounding_bound(model_type), limit)
        assert delta.diagnostics["layers"][0]["written_share"] == pytest.approx(1, abs=1e-6)
        residual = delta.intermediates[f"resid.layer{EDIT_LAYER}"][:, 0].double()
        key = delta.intermediates[f"keys.layer{EDIT_LAYER}"][0].double()
        error = update_as_map(model_type, EDIT_LAYER, delta) @ key - residual
        assert float(error.norm() / residual.norm()) < max(rounding_bound(model_type), 1e-6)
    assert_same_state(before, snapshot(model, tokenizer))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("is_identity", [True, False])
def test_the_default_lambda_writes_four_fifths_of_a_typical_key(is_identity, joint):
    """A = (lambda C + K K^T)^-1 K; lambda is a quarter of the key width, or of the keys' squared norm where C is I."""
    model, tokenizer = load_wide("llama")
    matrix = torch.eye(64, dtype=torch.float64) if is_identity else covariance("llama")[EDIT_LAYER]
    settings = {"second_moments": None} if is_identity else {}
    editor = load_memit_like("memit", "llama", layers=[EDIT_LAYER], moment_weight=None, **settings)
    for delta in editor.edit(model, tokenizer, EDIT_REQUESTS, joint=joint):
        keys_FU = delta.intermediates[f"keys.layer{EDIT_LAYER}"].T
        weight = (float(keys_FU.square().sum(0).mean()) if is_identity else 64) / 4
        right_FU = torch.linalg.solve(weight * matrix + keys_FU @ keys_FU.T, keys_FU)
        torch.testing.assert_close(delta.intermediates[f"adj_k.layer{EDIT_LAYER}"], right_FU, rtol=1e-8, atol=1e-10)
        share = delta.diagnostics["layers"][0]["written_share"]
        assert share == pytest.approx(float((keys_FU * right_FU).sum(0).mean()))
        if is_identity and not joint:
            assert share == pytest.approx(0.8)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama"])
def test_residuals_are_recomputed_and_divided_by_the_remaining_layers(model_type, joint):
    """z - h^L, h^L read by a plain forward with the earlier layers patched, over n - i."""
    model, tokenizer = load_wide(model_type)
    delta = load_memit_like("memit", model_type).edit(model, tokenizer, EDIT_REQUESTS, joint=joint)[0]
    block = model.get_submodule(ARCHITECTURES[model_type].block_name(LAYERS[-1]))
    row = rewriting_row(tokenizer, EDIT_REQUESTS[0], "{}")
    for index, layer in enumerate(LAYERS):
        names = [ARCHITECTURES[model_type].rewrite_name(n) for n in LAYERS[:index]]
        seen = []
        handle = block.register_forward_hook(
            lambda _m, _a, out, seen=seen: seen.append(out if isinstance(out, torch.Tensor) else out[0])
        )
        with torch.no_grad(), edited(model, Delta(factors={name: delta.factors[name] for name in names})):
            model(torch.tensor([row.ids]))
        handle.remove()
        hidden = seen[0][0, row.position]
        expected = (delta.intermediates["z"][0] - hidden) / (len(LAYERS) - index)
        ours = delta.intermediates[f"resid.layer{layer}"][:, 0]
        assert float((ours - expected).norm() / expected.norm()) < 1e-8


@each_model
def test_engines_and_application_modes_agree(model_type):
    """Rows under their own rank-one terms in one batch, against one edit after the other patched into the weights."""
    model, tokenizer = load_wide(model_type)
    fast = load_memit_like("memit", model_type).edit(model, tokenizer, EDIT_REQUESTS)
    plain = load_memit_like("memit", model_type, engine="reference").edit(model, tokenizer, EDIT_REQUESTS)
    alone = [load_memit_like("memit", model_type).edit(model, tokenizer, [request])[0] for request in EDIT_REQUESTS]
    for one, two, three in zip(fast, plain, alone, strict=True):
        assert largest_difference(one, two) < rounding_bound(model_type)
        assert largest_difference(one, three) < rounding_bound(model_type)


def test_a_batch_is_bounded_by_its_tokens(monkeypatch):
    model, tokenizer = load_wide("llama")
    whole = load_memit_like("memit", "llama").edit(model, tokenizer, EDIT_REQUESTS)
    monkeypatch.setattr(read_rows, "__defaults__", (None, 1))  # one row at a time
    for one, two in zip(whole, load_memit_like("memit", "llama").edit(model, tokenizer, EDIT_REQUESTS), strict=True):
        assert largest_difference(one, two) < 1e-8


@pytest.mark.parametrize("name", ["memit", "alphaedit"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_carried_keys_change_the_next_step_and_survive_the_disk(name, model_type, tmp_path):
    model, tokenizer = load_wide(model_type)
    settings = {"carry_keys": True, "nullspace_energy": 0.5, "l2": 0.3}
    settings = settings if name == "alphaedit" else {"carry_keys": True}
    editor = load_memit_like(name, model_type, **settings)
    (first,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:2], joint=True)
    assert {tensor.shape[1] for tensor in first.stream_state.values()} == {2} and len(first.stream_state) == len(LAYERS)
    first.save(tmp_path / "first.safetensors")
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, EDIT_REQUESTS[2:3], history=[first])
        (again,) = editor.edit(
            model, tokenizer, EDIT_REQUESTS[2:3], history=[Delta.load(tmp_path / "first.safetensors")]
        )
        (forgetful,) = editor.edit(model, tokenizer, EDIT_REQUESTS[2:3])
    assert largest_difference(second, again) == 0
    assert largest_difference(second, forgetful) > 1e-4
    # What was written first moves less when its keys are remembered.
    layer = LAYERS[0]
    keys_FU = first.stream_state[f"keys.layer{layer}"].double()
    remembered, forgotten = (update_as_map(model_type, layer, delta) @ keys_FU for delta in (second, forgetful))
    assert float(remembered.norm()) < float(forgotten.norm())


@each_normalized
def test_released_spreading_overshoots_and_ours_reaches_the_target(model_type):
    """MLP outputs are small before the norm in real models, so a change of their size is blown up by it."""
    model, tokenizer = build_model(model_type), load_wide(model_type)[1]
    with torch.no_grad():
        for layer in LAYERS:
            model.get_submodule(ARCHITECTURES[model_type].rewrite_name(layer)).weight.mul_(0.05)
    left, ratio = {}, {}
    for mode in ("faithful", "auto"):
        settings = {"residual_mode": mode, "moment_weight": 1e-6, "context_templates": ["{}"]}
        deltas = load_editor("memit", config={**MEMIT_CONFIG, **settings}).edit(model, tokenizer, EDIT_REQUESTS)
        left[mode] = [delta.diagnostics["distance_left"] for delta in deltas]
        ratio[mode] = [delta.diagnostics["update_norm_ratio"] for delta in deltas]
        expected = "normalized" if mode == "auto" else "faithful"
        assert all(delta.diagnostics["residual_mode"] == expected for delta in deltas)
    assert max(left["auto"]) < 0.3 and min(left["faithful"]) > 0.6, left
    assert sum(ratio["faithful"]) > 3 * sum(ratio["auto"]), ratio


def test_normalized_residuals_need_a_norm():
    model, tokenizer = load_wide("llama")
    with pytest.raises(EditingError, match=r"normalized.*llama"):
        load_memit_like("memit", "llama", residual_mode="normalized").edit(model, tokenizer, EDIT_REQUESTS[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": [2, 1]}, "ascending"),
        ({"layers": [1, 1]}, "ascending"),
        ({"moment_weight": 0}, "moment_weight"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(EditingError, match=message):
        load_editor("memit", config=settings)
