"""REVIVE by its formula: numbers worked by hand and the identities of the projection.

No code was released, so no run of the authors can be repeated.
"""

from __future__ import annotations

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from layered_edits import EDIT_REQUESTS, load_wide

from edit_hooks import Delta, EditingError, edited, load_editor
from edit_hooks.deltas.apply import read_parameter
from edit_hooks.deltas.delta import Factor
from edit_hooks.editors.revive import ORIGINALS, REVIVEConfig, SingularVectors, without_leading
from edit_hooks.locate.moments.leading import num_leading
from edit_hooks.utils.storage.files import cache_root

# Singular values 10, 5, 1; u_1 = (3, 4, 0) / 5 and v_1 = e_1.
WEIGHT = torch.tensor([[6.0, -4.0, 0.0, 0.0], [8.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
UPDATE = torch.tensor([[9.0, 5.0, 0.0, 10.0], [9.0, 10.0, 5.0, -5.0], [9.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
# The first column goes; (5, 10) - 11 u_1 = (-1.6, 1.2), (0, 5) - 4 u_1 = (-2.4, 1.8), (10, -5) - 2 u_1 = (8.8, -6.6).
PROJECTED = [[0.0, -1.6, -2.4, 8.8], [0.0, 1.2, 1.8, -6.6], [0.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("form", ["dense", "factor", "stored transposed"])
def test_an_update_worked_by_hand(form):
    weight = WEIGHT.T if form == "stored transposed" else WEIGHT
    vectors = SingularVectors.of(weight, REVIVEConfig(energy=0.5))
    if form == "dense":
        result = without_leading(UPDATE, vectors)
    else:
        factor = Factor(UPDATE, torch.eye(4, dtype=torch.float64), form != "factor")
        result = without_leading(factor, vectors).update()
    expected = torch.tensor(PROJECTED, dtype=torch.float64)
    torch.testing.assert_close(result.T if form == "stored transposed" else result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("energy_of", "energy", "expected"),
    # Squares 100, 25, 1 of 126: .794, .992; values 10, 5, 1 of 16: .625, .9375.
    [
        *[("squares", 0.0, 0), ("squares", 0.79, 1), ("squares", 0.8, 2), ("squares", 0.993, 3)],
        *[("values", 0.625, 1), ("values", 0.63, 2), ("values", 0.9375, 2), ("values", 0.94, 3)],
    ],
)
def test_the_least_number_of_triplets_with_the_share(energy_of, energy, expected):
    values = torch.tensor([10.0, 5.0, 1.0], dtype=torch.float64)
    assert num_leading(values, energy, energy_of) == expected


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_leading_triplets_stay_after_many_updates(shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    vectors = SingularVectors.of(weight, REVIVEConfig(energy=0.5))
    u, values, vh = torch.linalg.svd(weight)
    count = vectors.left_DK.shape[1]
    assert 0 < count == int((values.square().cumsum(0) < values.square().sum() / 2).sum()) + 1
    after = weight
    for _ in range(20):
        update = torch.randn(shape, generator=generator, dtype=torch.float64)
        safe = without_leading(update, vectors)
        torch.testing.assert_close(without_leading(safe, vectors), safe, rtol=0, atol=1e-12)  # idempotent
        after = after + safe
    scaled = u[:, :count] * values[:count]
    torch.testing.assert_close(after @ vh[:count].T, scaled, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.T @ u[:, :count], vh[:count].T * values[:count], rtol=0, atol=1e-12)


def make(**settings):
    return load_editor("revive", {"layers": [0, 1], "base": "memit", "base_settings": base_settings(), **settings})


def base_settings():
    return {name: value for name, value in MEMIT_CONFIG.items() if name not in ("layers", "seed", "engine")}


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_stream_keeps_the_triplets_of_the_original_weights(model_type):
    model, tokenizer = load_wide(model_type)
    history: list[Delta] = []
    for request in EDIT_REQUESTS[:2]:
        # A new editor each time, as in a resumed run: the vectors come from their file alone.
        editor = make(energy=0.1)
        editor.resolve_config(model, tokenizer)
        past = editor.condensed(model, history)
        with edited(model, Delta.summed(history)):
            (delta,) = editor.edit(model, tokenizer, [request], joint=True, history=past)
        originals = {name: read_parameter(model, name).double().clone() for name in delta.parameter_names}
        history.append(delta)
    assert all(delta.is_low_rank for delta in history)
    assert not any("revive" in name for delta in history for name in delta.stream_state)
    assert (
        history[0].meta[ORIGINALS] == history[1].meta[ORIGINALS] == editor.condensed(model, history)[-1].meta[ORIGINALS]
    )
    cached = {path.suffix for path in (cache_root() / "singular_vectors").rglob("*") if path.is_file()}
    assert cached == {".safetensors", ".json"}
    total = Delta.summed(history)
    for name, weight in originals.items():
        update = total.weight(name).double()
        left, right = (
            side.double() for side in SingularVectors.of(weight.float(), editor.resolve_config(model, tokenizer))
        )
        u, _, vh = torch.linalg.svd(weight)
        count = left.shape[1]
        assert count == history[1].diagnostics["revive"][name]["num_kept"] > 0
        torch.testing.assert_close(left @ left.T, u[:, :count] @ u[:, :count].T, rtol=0, atol=1e-5)
        torch.testing.assert_close(right @ right.T, vh[:count].T @ vh[:count], rtol=0, atol=1e-5)
        assert float(update.norm()) > 0
        assert float((u[:, :count].T @ update).norm()) < 1e-5 * float(update.norm())
        assert float((update @ vh[:count].T).norm()) < 1e-5 * float(update.norm())


def test_without_triplets_it_is_the_plain_editor():
    model, tokenizer = load_wide("llama")
    (plain,) = load_editor("memit", {"layers": [0, 1], **base_settings()}).edit(model, tokenizer, EDIT_REQUESTS[:1])
    (delta,) = make(energy=0).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert plain.parameter_names == delta.parameter_names
    for name, update in plain.weights().items():
        torch.testing.assert_close(delta.weight(name), update, rtol=0, atol=0)


def test_an_exact_base_is_refused():
    with pytest.raises(EditingError, match="Drop stream: exact"):
        make(base_settings={**base_settings(), "stream": "exact"})


@pytest.mark.parametrize(("energy", "is_little"), [(0.3, False), (0.999, True)])
def test_dense_updates_are_projected_and_little_ones_named(energy, is_little):
    model, tokenizer = load_wide("gpt2")
    base = {"layers": [1], "num_steps": 2}
    settings = {"base": "ft_m", "base_settings": {"num_steps": 2}, "layers": [1], "energy": energy}
    (plain,) = load_editor("ft_m", base).edit(model, tokenizer, EDIT_REQUESTS[:1])
    editor = load_editor("revive", settings)
    (delta,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:1])
    biases = [name for name, update in plain.dense.items() if update.dim() == 1]
    (weight,) = plain.dense.keys() - set(biases)
    assert biases and all(torch.equal(delta.dense[name], plain.dense[name]) for name in biases)
    original = read_parameter(model, weight)
    left, right = (side.double() for side in SingularVectors.of(original, editor.resolve_config(model, tokenizer)))
    assert not delta.stream_state and editor.most_state_bytes(model) == 0
    bound = 1e-6 * float(plain.dense[weight].norm())
    update = delta.dense[weight].double()
    assert float((left.T @ update).norm()) < bound and float((update @ right).norm()) < bound
    share = delta.diagnostics["revive"][weight]["kept_norm_share"]
    assert share == pytest.approx(float(update.norm() / plain.dense[weight].norm()), abs=1e-6)
    assert any("Set a smaller energy" in warning for warning in delta.warnings) == is_little == (share < 0.1)


def test_a_stream_whose_vectors_are_gone_is_refused(monkeypatch, tmp_path):
    """Vectors of the edited weights would not be those of the original ones."""
    model, tokenizer = load_wide("llama")
    (first,) = make().edit(model, tokenizer, EDIT_REQUESTS[:1], joint=True)
    monkeypatch.setattr("edit_hooks.editors.revive.cache_root", lambda: tmp_path)
    with edited(model, first), pytest.raises(EditingError, match="Make the stream from its first step"):
        make().edit(model, tokenizer, EDIT_REQUESTS[1:2], joint=True, history=[first])
