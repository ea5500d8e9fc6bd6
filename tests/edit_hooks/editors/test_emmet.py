"""EMMET: its equivalence with MEMIT, and exact writing without a ridge."""

from __future__ import annotations

import pytest
import torch
from layered_edits import (
    EDIT_REQUESTS,
    each_model,
    largest_difference,
    load_memit_like,
    load_wide,
    rounding_bound,
    update_as_map,
)

from edit_hooks.contract.tiny_models import EDIT_LAYER


@each_model
@pytest.mark.parametrize("joint", [False, True])
def test_equals_memit_with_the_product_of_its_weights(model_type, joint):
    model, tokenizer = load_wide(model_type)
    settings = {"layers": [EDIT_LAYER]}
    emmet = load_memit_like("emmet", model_type, moment_weight=30.0, ridge=0.1, **settings)
    memit = load_memit_like("memit", model_type, moment_weight=3.0, **settings)
    ours = emmet.edit(model, tokenizer, EDIT_REQUESTS, joint=joint)
    theirs = memit.edit(model, tokenizer, EDIT_REQUESTS, joint=joint)
    for one, two in zip(ours, theirs, strict=True):
        assert largest_difference(one, two) < max(rounding_bound(model_type) / 10, 1e-8)


@each_model
def test_without_a_ridge_maps_the_key_exactly(model_type):
    model, tokenizer = load_wide(model_type)
    for settings in ({"ridge": 0.0}, {"ridge": 0.1, "ridge_single": False}, {"ridge": 0.0, "identity_weight": 2.0}):
        (delta,) = load_memit_like("emmet", model_type, layers=[EDIT_LAYER], **settings).edit(
            model, tokenizer, EDIT_REQUESTS[:1]
        )
        key = delta.intermediates[f"keys.layer{EDIT_LAYER}"][0].double()
        residual = delta.intermediates[f"resid.layer{EDIT_LAYER}"][:, 0].double()
        error = update_as_map(model_type, EDIT_LAYER, delta) @ key - residual
        assert float(error.norm() / residual.norm()) < 1e-5


@pytest.mark.parametrize("joint", [False, True])
def test_no_second_moments_are_the_identity_with_both_weights(joint):
    """C_s = lambda I + nu I = 5 I, whose scale matters beside eps."""
    model, tokenizer = load_wide("llama")
    settings = {"layers": [EDIT_LAYER], "moment_weight": 3.0, "identity_weight": 2.0, "ridge": 0.1}
    identity = {EDIT_LAYER: torch.eye(64, dtype=torch.float64)}
    without, given, other = (
        load_memit_like("emmet", "llama", **{**settings, **changes}).edit(model, tokenizer, EDIT_REQUESTS, joint=joint)
        for changes in (
            {"second_moments": None},
            {"second_moments": identity},
            {"second_moments": None, "identity_weight": 0.0},
        )
    )
    for one, two, three in zip(without, given, other, strict=True):
        assert largest_difference(one, two) < 1e-10
        assert largest_difference(one, three) > 1e-3
