"""Invariants of the multi-layer editors: algebra, null spaces, norms, suffix-only rows, adapters.

Models run in float64 where they can, so that a bound of 1e-8 tells another formula from rounding (GPT-J and Gemma 2
compute their softmax in float32).
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state import assert_same_state, snapshot
from tiny import (
    ALL_MODEL_TYPES,
    CONTEXT_TEMPLATES,
    EDIT_LAYER,
    MEMIT_CONFIG,
    NATURAL_TOKENIZER,
    REQUESTS,
    SENTENCES,
    build_model,
    build_tokenizer,
)

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.editors.prune import PRUNEConfig, restrained
from edit_hooks.editors.rect import largest_changes
from edit_hooks.locate.key_reader import read_rows
from edit_hooks.locate.post_norm import gains, nearest_on_ellipsoid, nearest_outputs
from edit_hooks.locate.rows import rewriting_row
from edit_hooks.locate.second_moments import MomentSettings, second_moments
from edit_hooks.locate.solve import SecondMoment, ridge_keys
from edit_hooks.modeling.architectures import ARCHITECTURES, is_transposed

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
EAGER_ONLY = {"gptj", "gemma2"}
each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
each_normalized = pytest.mark.parametrize(
    "model_type", [name for name in ALL_MODEL_TYPES if ARCHITECTURES[name].normalizes_mlp_output]
)
LAYERS = [0, EDIT_LAYER]


@functools.cache
def loaded(model_type: str):
    dtype = torch.float32 if model_type in EAGER_ONLY else torch.float64
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


def bound(model_type: str) -> float:
    return 1e-3 if model_type in EAGER_ONLY else 1e-8


@functools.cache
def covariance(model_type: str) -> dict[int, torch.Tensor]:
    moments = second_moments(*loaded(model_type), LAYERS, MomentSettings(SENTENCES), quiet=True)
    # A ridge makes it well-conditioned, so that the forms compared below agree to many digits.
    return {n: m.matrix_FF.double() + 0.05 * torch.eye(len(m.matrix_FF)).double() for n, m in moments.items()}


def make(name: str, model_type: str, **overrides):
    fixed = {"second_moments": covariance(model_type), "keep_intermediates": True, "num_steps": 5}
    config = {**MEMIT_CONFIG, **fixed, **overrides}
    return load_editor(name, config=config)


def distance(ours: Delta, theirs: Delta) -> float:
    first, second = ours.weights(), theirs.weights()
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in first)


def as_map(model_type: str, layer: int, delta: Delta) -> torch.Tensor:
    """The update of one layer as a map R^f -> R^d, float64."""
    name = ARCHITECTURES[model_type].rewrite_name(layer)
    update = delta.weights()[f"{name}.weight"].double()
    return update.T if is_transposed(loaded(model_type)[0].get_submodule(name)) else update


def random_keys(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- 3: MEMIT's algebra ----------------------------------------------------------------------------------------------


@given(u=st.integers(1, 6), past=st.integers(0, 5), weight=st.sampled_from([0.01, 1.0, 1000.0]))
def test_the_system_over_edits_equals_the_system_over_features(u, past, weight):
    """(lambda C + K_p K_p^T + K K^T)^-1 K, solved densely, against the u x u form; and the scalar formula for u = 1."""
    width = 24
    basis = random_keys(60, width, seed=1)
    matrix_FF = basis.T @ basis / 60
    keys_UF, past_PF = random_keys(u, width, seed=2), random_keys(past, width, seed=3)
    dense_FF = weight * matrix_FF + past_PF.T @ past_PF + keys_UF.T @ keys_UF
    expected_UF = torch.linalg.solve(dense_FF, keys_UF.T).T
    moment = SecondMoment(matrix_FF)
    everything = torch.cat([past_PF, keys_UF])
    ours_UF = ridge_keys(everything, moment.metric_product(everything), weight)[past:]
    torch.testing.assert_close(ours_UF, expected_UF, rtol=1e-9, atol=1e-12)
    if u == 1 and past == 0:
        applied_F = torch.linalg.solve(matrix_FF, keys_UF[0])
        torch.testing.assert_close(ours_UF[0], applied_F / (weight + keys_UF[0] @ applied_F))


def test_dependent_keys_without_a_ridge_get_the_least_squares_solution():
    keys = random_keys(1, 10).repeat(2, 1)
    adjusted = ridge_keys(keys, keys, 0.0)
    torch.testing.assert_close(adjusted.sum(0) @ keys[0], torch.tensor(1.0, dtype=torch.float64))


@each_model
def test_a_vanishing_ridge_writes_the_whole_residual(model_type):
    """One layer, the bare prompt only, lambda near zero: h^L goes to z, through the norm where there is one."""
    model, tokenizer = loaded(model_type)
    editor = make("memit", model_type, layers=[EDIT_LAYER], context_templates=["{}"], moment_weight=1e-9)
    before = snapshot(model, tokenizer)
    for delta in editor.edit(model, tokenizer, EDIT_REQUESTS):
        # Norms compute in float32 under every model dtype and add an epsilon that the mapping leaves out.
        limit = 1e-4 if ARCHITECTURES[model_type].normalizes_mlp_output else 1e-8
        assert delta.diagnostics["distance_left"] < max(bound(model_type), limit)
        assert delta.diagnostics["layers"][0]["written_share"] == pytest.approx(1, abs=1e-6)
        residual = delta.intermediates[f"resid.layer{EDIT_LAYER}"][:, 0].double()
        key = delta.intermediates[f"keys.layer{EDIT_LAYER}"][0].double()
        error = as_map(model_type, EDIT_LAYER, delta) @ key - residual
        assert float(error.norm() / residual.norm()) < max(bound(model_type), 1e-6)
    assert_same_state(before, snapshot(model, tokenizer))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama"])
def test_residuals_are_recomputed_and_divided_by_the_remaining_layers(model_type, joint):
    """z - h^L, h^L read by a plain forward with the earlier layers patched, over n - i."""
    model, tokenizer = loaded(model_type)
    delta = make("memit", model_type).edit(model, tokenizer, EDIT_REQUESTS, joint=joint)[0]
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
    model, tokenizer = loaded(model_type)
    fast = make("memit", model_type).edit(model, tokenizer, EDIT_REQUESTS)
    plain = make("memit", model_type, engine="reference").edit(model, tokenizer, EDIT_REQUESTS)
    alone = [make("memit", model_type).edit(model, tokenizer, [request])[0] for request in EDIT_REQUESTS]
    for one, two, three in zip(fast, plain, alone, strict=True):
        assert distance(one, two) < bound(model_type)
        assert distance(one, three) < bound(model_type)


def test_a_batch_is_bounded_by_its_tokens(monkeypatch):
    model, tokenizer = loaded("llama")
    whole = make("memit", "llama").edit(model, tokenizer, EDIT_REQUESTS)
    monkeypatch.setattr(read_rows, "__defaults__", (None, 1))  # one row at a time
    for one, two in zip(whole, make("memit", "llama").edit(model, tokenizer, EDIT_REQUESTS), strict=True):
        assert distance(one, two) < 1e-8


# --- 4: EMMET --------------------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("joint", [False, True])
def test_emmet_equals_memit_with_the_product_of_its_weights(model_type, joint):
    model, tokenizer = loaded(model_type)
    settings = {"layers": [EDIT_LAYER]}
    emmet = make("emmet", model_type, moment_weight=30.0, ridge=0.1, **settings)
    memit = make("memit", model_type, moment_weight=3.0, **settings)
    ours = emmet.edit(model, tokenizer, EDIT_REQUESTS, joint=joint)
    theirs = memit.edit(model, tokenizer, EDIT_REQUESTS, joint=joint)
    for one, two in zip(ours, theirs, strict=True):
        assert distance(one, two) < max(bound(model_type) / 10, 1e-8)


@each_model
def test_emmet_without_a_ridge_maps_the_key_exactly(model_type):
    model, tokenizer = loaded(model_type)
    for settings in ({"ridge": 0.0}, {"ridge": 0.1, "ridge_single": False}, {"ridge": 0.0, "identity_weight": 2.0}):
        (delta,) = make("emmet", model_type, layers=[EDIT_LAYER], **settings).edit(model, tokenizer, EDIT_REQUESTS[:1])
        key = delta.intermediates[f"keys.layer{EDIT_LAYER}"][0].double()
        residual = delta.intermediates[f"resid.layer{EDIT_LAYER}"][:, 0].double()
        error = as_map(model_type, EDIT_LAYER, delta) @ key - residual
        assert float(error.norm() / residual.norm()) < 1e-5


# --- 5: AlphaEdit ----------------------------------------------------------------------------------------------------


def alphaedit(model_type: str, **overrides):
    config = {"nullspace_energy": 0.5, "l2": 0.3, "moment_weight": None, **overrides}
    return make("alphaedit", model_type, **config)


@each_model
def test_the_projector_projects_and_the_update_stays_in_the_null_space(model_type):
    model, tokenizer = loaded(model_type)
    editor = alphaedit(model_type)
    editor.resolve_config(model, tokenizer)
    projectors = editor.constraints(model)
    (joint,) = editor.edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    for delta in (*editor.edit(model, tokenizer, EDIT_REQUESTS), joint):
        for layer in LAYERS:
            matrix = covariance(model_type)[layer]
            dense = projectors[layer].metric_product(torch.eye(len(matrix), dtype=torch.float64))
            torch.testing.assert_close(dense @ dense, dense, atol=1e-10, rtol=0)
            torch.testing.assert_close(dense, dense.T, atol=1e-10, rtol=0)
            assert 0 < projectors[layer].rank < len(matrix)
            update = as_map(model_type, layer, delta)
            assert float((update @ dense - update).norm() / update.norm()) < 1e-5  # factors are kept in float32
            values, vectors = torch.linalg.eigh(matrix)
            preserved = vectors[:, values >= projectors[layer].threshold]
            assert float((update @ preserved).norm() / update.norm()) < 1e-5


@given(u=st.integers(1, 4), past=st.integers(0, 4), l2=st.sampled_from([0.1, 1.0, 10.0]))
def test_released_paper_and_low_rank_forms_are_equal(u, past, l2):
    """[P (K K^T + S) + L2 I]^-1 P K R^T, R K^T P (S P + K K^T P + L2 I)^-1, and the form with the small system."""
    width, out = 20, 7
    basis, _ = torch.linalg.qr(random_keys(width, width, seed=4))
    projector_FF = basis[:, :12] @ basis[:, :12].T
    keys_UF, past_PF = random_keys(u, width, seed=5), random_keys(past, width, seed=6)
    residual_DU = random_keys(out, u, seed=7)
    seen_FF = past_PF.T @ past_PF
    identity = torch.eye(width, dtype=torch.float64)
    released = torch.linalg.solve(
        projector_FF @ (keys_UF.T @ keys_UF + seen_FF) + l2 * identity, projector_FF @ keys_UF.T @ residual_DU.T
    ).T
    system = seen_FF @ projector_FF + keys_UF.T @ keys_UF @ projector_FF + l2 * identity
    paper = torch.linalg.solve(system, residual_DU @ keys_UF @ projector_FF, left=False)
    everything = torch.cat([past_PF, keys_UF])
    ours = residual_DU @ ridge_keys(everything, everything @ projector_FF, l2)[past:]
    torch.testing.assert_close(ours, released, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ours, paper, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["memit", "alphaedit"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_carried_keys_change_the_next_step_and_survive_the_disk(name, model_type, tmp_path):
    model, tokenizer = loaded(model_type)
    settings = {"carry_keys": True, "nullspace_energy": 0.5, "l2": 0.3}
    settings = settings if name == "alphaedit" else {"carry_keys": True}
    editor = make(name, model_type, **settings)
    (first,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:2], joint=True)
    assert {tensor.shape[1] for tensor in first.stream_state.values()} == {2} and len(first.stream_state) == len(LAYERS)
    first.save(tmp_path / "first.safetensors")
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, EDIT_REQUESTS[2:3], history=[first])
        (again,) = editor.edit(
            model, tokenizer, EDIT_REQUESTS[2:3], history=[Delta.load(tmp_path / "first.safetensors")]
        )
        (forgetful,) = editor.edit(model, tokenizer, EDIT_REQUESTS[2:3])
    assert distance(second, again) == 0
    assert distance(second, forgetful) > 1e-4
    # What was written first moves less when its keys are remembered.
    layer = LAYERS[0]
    keys_FU = first.stream_state[f"keys.layer{layer}"].double()
    remembered, forgotten = (as_map(model_type, layer, delta) @ keys_FU for delta in (second, forgetful))
    assert float(remembered.norm()) < float(forgotten.norm())


def test_edits_without_a_history_are_independent():
    """Released frameworks leak keys from one independent edit to the next."""
    model, tokenizer = loaded("llama")
    editor = alphaedit("llama")
    first = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2])[0]
    editor.edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert distance(editor.edit(model, tokenizer, EDIT_REQUESTS[1:2])[0], first) == 0


# --- 6: RECT and PRUNE -----------------------------------------------------------------------------------------------


@given(
    keep=st.floats(0.01, 1.0),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    guard=st.sampled_from([0.0, 1e-8]),
    seed=st.integers(0, 5),
)
def test_rect_keeps_the_configured_share(keep, rows, columns, guard, seed):
    weight, update = random_keys(rows, columns, seed), random_keys(rows, columns, seed + 10)
    weight[0, 0] = 0.0
    mask = largest_changes(update, weight, keep, guard)
    zeroed = int((1 - keep) * mask.numel())
    assert int(mask.sum()) == mask.numel() - max(zeroed - 1, 0)  # the entry at the threshold stays
    score = (update / (weight + guard)).abs()
    if not bool(mask.all()):
        assert float(score[mask].min()) >= float(score[~mask].max())
    assert bool(mask[0, 0])  # an update of a zero weight is an infinite relative change


@each_model
def test_rect_leaves_kept_entries_unchanged(model_type):
    model, tokenizer = loaded(model_type)
    config = {**MEMIT_CONFIG, "second_moments": None}
    base = load_editor("memit", config=config).edit(model, tokenizer, EDIT_REQUESTS[:1])[0]
    sparse = load_editor("rect", config={"base_settings": config}).edit(model, tokenizer, EDIT_REQUESTS[:1])[0]
    for name, update in base.weights().items():
        kept = sparse.weights()[name] != 0
        assert torch.equal(sparse.weights()[name][kept], update[kept])
        assert float(kept.float().mean()) == pytest.approx(0.4, abs=2e-3)
    everything = load_editor("rect", config={"base_settings": config, "keep": 1.0})
    assert distance(everything.edit(model, tokenizer, EDIT_REQUESTS[:1])[0], base) == 0


@given(
    log_base=st.sampled_from([math.e, 2.0, 1.5, 1.2]),
    function=st.sampled_from(["log", "linear"]),
    safe=st.booleans(),
    largest=st.floats(0.05, 50),
)
def test_prune_restrains_large_singular_values_only(log_base, function, safe, largest):
    config = PRUNEConfig(log_base=log_base, function=function, safe=safe)
    values = torch.linspace(0, 4 * largest, 401, dtype=torch.float64)
    out = restrained(values, largest, config)
    below = values < largest
    assert torch.equal(out[below], values[below])
    assert bool((out.diff() > -1e-9).all())
    edge = restrained(torch.tensor([largest * (1 - 1e-9), largest * (1 + 1e-9)], dtype=torch.float64), largest, config)
    assert float(edge[1] - edge[0]) < 1e-6 * largest * max(1, 1 / largest)
    if safe:
        assert bool((out <= values + 1e-12).all())
    if function == "linear":
        torch.testing.assert_close(out[~below], (values[~below] + largest) / 2)


@each_model
def test_prune_leaves_a_small_edit_unchanged(model_type):
    """Nothing above the largest original singular value: the base editor's update, in a stream too."""
    model, tokenizer = loaded(model_type)
    config = {**MEMIT_CONFIG, "second_moments": None, "clamp_factor": 0.05}
    history: list[Delta] = []
    base: list[Delta] = []
    editor, plain = load_editor("prune", config={"base_settings": config}), load_editor("memit", config=config)
    for request in EDIT_REQUESTS[:3]:
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
        with edited(model, *base):
            base += plain.edit(model, tokenizer, [request], history=base)
    assert all(facts["num_restrained"] == 0 for facts in history[-1].diagnostics["prune"].values())
    for name, update in Delta.summed(base).weights().items():
        ours = sum(delta.weights()[name] for delta in history)
        assert float((ours - update).norm() / update.norm()) < max(bound(model_type), 1e-5)


def test_prune_accepts_editors_with_dense_updates():
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    base = {"layers": [EDIT_LAYER], "num_steps": 5, "lr": 0.05}  # crude on purpose: singular values above the original
    editor = load_editor("prune", config={"base": "ft_m", "base_settings": base, "safe": True})
    history: list[Delta] = []
    for request in EDIT_REQUESTS[:2]:
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
    name = f"{ARCHITECTURES['gpt2'].rewrite_name(EDIT_LAYER)}.weight"
    facts = history[-1].diagnostics["prune"][name]
    assert facts["num_restrained"] > 0
    total = sum(delta.weights()[name].double() for delta in history)
    assert float(torch.linalg.svdvals(total)[0]) == pytest.approx(facts["largest_after"], rel=1e-4)


# --- 9: rows cut at the fact token -----------------------------------------------------------------------------------


@each_model
def test_read_activations_do_not_depend_on_later_tokens_or_the_batch(model_type):
    model, tokenizer = loaded(model_type)
    rows = [rewriting_row(tokenizer, request, text) for request in EDIT_REQUESTS for text in CONTEXT_TEMPLATES]
    together = read_rows(model, rows, LAYERS, EDIT_LAYER)
    arch = ARCHITECTURES[model_type]
    for index in (0, 5, len(rows) - 1):
        seen: dict[str, torch.Tensor] = {}
        handles = [
            model.get_submodule(arch.rewrite_name(layer)).register_forward_pre_hook(
                lambda _m, args, layer=layer, seen=seen: seen.update({f"key{layer}": args[0]})
            )
            for layer in LAYERS
        ]
        handles.append(
            model.get_submodule(arch.block_name(EDIT_LAYER)).register_forward_hook(
                lambda _m, _a, out, seen=seen: seen.update(hidden=out if isinstance(out, torch.Tensor) else out[0])
            )
        )
        with torch.no_grad():
            model(torch.tensor([rows[index].ids]))  # the whole sequence, target included
        for handle in handles:
            handle.remove()
        at = rows[index].position
        for layer in LAYERS:
            torch.testing.assert_close(together.keys_RF[layer][index], seen[f"key{layer}"][0, at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.hidden_RD[index], seen["hidden"][0, at], atol=1e-4, rtol=1e-4)


# --- writing through norms -------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 20), scale=st.sampled_from([1e-3, 1.0, 100.0]), width=st.integers(2, 6))
def test_the_projection_on_the_ellipsoid_is_the_nearest_point(seed, scale, width):
    """Feasible, and no random or neighboring point of the ellipsoid is nearer."""
    gain_D = random_keys(1, width, seed)[0]
    wanted_ED = scale * random_keys(3, width, seed + 1)
    points_ED = nearest_on_ellipsoid(gain_D, wanted_ED)
    torch.testing.assert_close(points_ED.square().mean(1), torch.ones(3, dtype=torch.float64), atol=1e-8, rtol=0)
    best_E = (gain_D * points_ED - wanted_ED).norm(dim=1)
    for step in (0.01, 0.3, 10.0):
        others = points_ED + step * random_keys(500, width, seed + 2)[:, None]
        others = others / others.square().mean(2, keepdim=True).sqrt()
        distances = (gain_D * others - wanted_ED).norm(dim=2)
        assert bool((distances >= best_E - 1e-7 * (1 + best_E)).all())


@each_normalized
def test_reachable_contributions_are_reached_and_the_length_is_kept(model_type):
    model, _ = loaded(model_type)
    norm = model.get_submodule(ARCHITECTURES[model_type].post_norm_name(EDIT_LAYER))
    width = model.config.hidden_size
    now, wanted = random_keys(4, width, 1), random_keys(4, width, 2)
    dtype = next(norm.parameters()).dtype
    with torch.no_grad():
        share = (norm(wanted.to(dtype)) - norm(now.to(dtype))).double()
        found = nearest_outputs(norm, now, share)
        torch.testing.assert_close(norm(found.to(dtype)), norm(wanted.to(dtype)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(nearest_outputs(norm, now, torch.zeros_like(now)), now, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.norm(dim=1), now.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm(torch.ones(width, dtype=dtype)).double(), gains(norm, width), atol=1e-5, rtol=1e-5)


@each_normalized
def test_released_spreading_overshoots_and_ours_reaches_the_target(model_type):
    """MLP outputs are small before the norm in real models, so a change of their size is blown up by it."""
    model, tokenizer = build_model(model_type), loaded(model_type)[1]
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
    model, tokenizer = loaded("llama")
    with pytest.raises(EditingError, match=r"normalized.*llama"):
        make("memit", "llama", residual_mode="normalized").edit(model, tokenizer, EDIT_REQUESTS[:1])


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
