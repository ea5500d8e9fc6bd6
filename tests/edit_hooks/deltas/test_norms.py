"""Norm ratios, against the dense updates."""

from __future__ import annotations

import pytest
from random_deltas import dense_delta, masked_delta, random_delta

from edit_hooks import Delta
from edit_hooks.deltas.norms import largest_norm_ratio, update_norm_ratio


def ratios(model, delta) -> list[float]:
    """||update|| / ||W|| of every changed parameter."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return [float(update.norm() / parameters[name].norm()) for name, update in delta.weights().items()]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_ratios_equal_those_of_the_dense_updates(model_type, tiny_model):
    model = tiny_model(model_type)
    low_rank = random_delta(model, layers=(0, 1), ranks=(1, 3))
    mixed = Delta.summed([low_rank, dense_delta(model)])
    for delta in (low_rank, dense_delta(model), mixed):
        values = ratios(model, delta)
        mean_square = sum(value**2 for value in values) / len(values)
        assert update_norm_ratio(model, delta) == pytest.approx(mean_square**0.5, rel=1e-5)
        assert largest_norm_ratio(model, delta) == pytest.approx(max(values), rel=1e-5)
    (value,) = ratios(model, masked_delta(model))
    assert largest_norm_ratio(model, masked_delta(model)) == pytest.approx(value, rel=1e-5)


def test_an_empty_delta_has_ratio_zero(tiny_model):
    assert update_norm_ratio(tiny_model("llama"), Delta()) == 0.0
