"""MLP outputs whose norm is nearest to a wanted contribution."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import (
    each_normalized,
    load_wide,
    random_keys,
)
from tiny_architectures import ARCHITECTURES

from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.locate.values.post_norm import gains, nearest_on_ellipsoid, nearest_outputs


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
    model, _ = load_wide(model_type)
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
