"""Norm ratios, against the dense updates."""

from __future__ import annotations

import pytest
import torch
from random_deltas import dense_delta, masked_delta, random_delta

from edit_hooks import Delta
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.deltas.norms import largest_norm_ratio, update_norm_ratio

MAP = "transformer.h.1.mlp.c_proj"


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


def test_biases_have_no_part_in_the_ratio_of_matrices():
    model = build_model("gpt2")
    weight = model.get_submodule(MAP).weight.detach()
    plain = Delta(dense={f"{MAP}.weight": 0.5 * weight})
    biased = Delta(dense={**plain.dense, f"{MAP}.bias": torch.ones(weight.shape[1])})
    assert update_norm_ratio(model, biased) == update_norm_ratio(model, plain) == pytest.approx(0.5)
    assert update_norm_ratio(model, Delta(dense={f"{MAP}.bias": biased.dense[f"{MAP}.bias"]})) == 0


def test_parameters_that_are_zero_have_no_largest_ratio():
    """As the biases of a new model; a share of nothing is no number."""
    model = build_model("gpt2")
    module = model.get_submodule(MAP)
    with torch.no_grad():
        module.bias.zero_()
    delta = Delta(dense={f"{MAP}.weight": 0.25 * module.weight.detach(), f"{MAP}.bias": torch.ones_like(module.bias)})
    assert largest_norm_ratio(model, delta) == pytest.approx(0.25)
    assert largest_norm_ratio(model, Delta(dense={f"{MAP}.bias": torch.ones_like(module.bias)})) == 0
