"""Solves of the closed-form updates."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import (
    random_keys,
)

from edit_hooks.locate.moments.solve import SecondMoment, ridge_keys


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
