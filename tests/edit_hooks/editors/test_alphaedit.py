"""AlphaEdit: the null space, equal forms of the update, and independence of edits."""

from __future__ import annotations

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import (
    EDIT_REQUESTS,
    LAYERS,
    covariance,
    each_model,
    largest_difference,
    load_memit_like,
    load_wide,
    random_keys,
    update_as_map,
)
from safetensors.torch import save_file

from edit_hooks import EditingError, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model
from edit_hooks.locate.moments.solve import ridge_keys


def load_alphaedit(model_type: str, **overrides):
    config = {"nullspace_energy": 0.5, "l2": 0.3, "moment_weight": None, **overrides}
    return load_memit_like("alphaedit", model_type, **config)


@each_model
def test_the_projector_projects_and_the_update_stays_in_the_null_space(model_type):
    model, tokenizer = load_wide(model_type)
    editor = load_alphaedit(model_type)
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
            update = update_as_map(model_type, layer, delta)
            assert float((update @ dense - update).norm() / update.norm()) < 1e-5  # factors are kept in float32
            values, vectors = torch.linalg.eigh(matrix)
            preserved = vectors[:, values >= projectors[layer].threshold]
            assert float((update @ preserved).norm() / update.norm()) < 1e-5


@pytest.mark.parametrize("name", ["alphaedit", "evk_edit"])
def test_a_missing_file_of_projectors_is_named_before_the_weights_are_loaded(name, tmp_path):
    with torch.device("meta"):
        outline = build_model("llama")
    for path in (str(tmp_path / "P.safetensors"), tmp_path / "P.safetensors"):
        with pytest.raises(EditingError, match=r"file of 'projectors'.*P\.safetensors"):
            load_editor(name, {"layers": [1], "projectors": path}).check_settings(outline)
    save_file({"layer1": torch.eye(64)}, tmp_path / "P.safetensors")
    editor = load_editor(name, {"layers": [1], "projectors": path})
    editor.check_settings(outline)
    # Text behind second moments is not read beside projectors, so it need not exist.
    editor.check_inputs(editor.config_class(projectors=path, second_moments="missing.txt"))
    with pytest.raises(EditingError, match=r"missing\.txt"):
        editor.check_inputs(editor.config_class(second_moments="missing.txt"))


def test_the_default_l2_is_a_hundredth_of_the_trace_or_ten_beside_given_projectors():
    model, tokenizer = load_wide("llama")
    trace = float(covariance("llama")[EDIT_LAYER].trace())
    basis_FR, _ = torch.linalg.qr(random_keys(64, 40))
    common = {**MEMIT_CONFIG, "layers": [EDIT_LAYER], "num_steps": 5}
    from_moments = {**common, "second_moments": covariance("llama"), "nullspace_energy": 0.5}
    from_projectors = {**common, "projectors": {EDIT_LAYER: basis_FR @ basis_FR.T}}
    for settings, l2 in ((from_moments, 0.01 * trace), (from_projectors, 10.0)):
        default, expected, other = (
            load_editor("alphaedit", {**settings, "l2": value}).edit(model, tokenizer, EDIT_REQUESTS, joint=True)[0]
            for value in (None, l2, 1.1 * l2)
        )
        assert largest_difference(default, expected) < 1e-10
        assert largest_difference(default, other) > 1e-3


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


def test_edits_without_a_history_are_independent():
    """Released frameworks leak keys from one independent edit to the next."""
    model, tokenizer = load_wide("llama")
    editor = load_alphaedit("llama")
    first = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2])[0]
    editor.edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert largest_difference(editor.edit(model, tokenizer, EDIT_REQUESTS[1:2])[0], first) == 0
