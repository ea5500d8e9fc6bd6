"""Integrated gradients: known integrals, completeness, and the prefix cache."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import relative_error
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, NATURAL_TOKENIZER, REQUESTS
from edit_hooks.gradient.integrated_gradients import TokenProbability, integrated_gradients
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode

REQUEST = EditRequest(**REQUESTS[0])


def test_linear_and_cubic_functions_have_known_attributions():
    activation_F = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    slope_F = torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)
    for riemann in ("both_ends", "left"):
        linear_F = integrated_gradients(lambda rows: rows @ slope_F + 3, activation_F, 2, riemann, 1)
        torch.testing.assert_close(linear_F, activation_F * slope_F)
    # d/da_i sum a^3 = 3 a_i^2; the mean of c^2 over the points is known in closed form.
    steps = 20
    both = sum((j / (steps - 1)) ** 2 for j in range(steps)) / steps
    left = sum((j / steps) ** 2 for j in range(steps)) / steps
    for riemann, mean in (("both_ends", both), ("left", left)):
        cubic_F = integrated_gradients(lambda rows: (rows**3).sum(1), activation_F, steps, riemann, 6)
        torch.testing.assert_close(cubic_F, 3 * mean * activation_F**3)
    many_F = integrated_gradients(lambda rows: (rows**3).sum(1), activation_F, 4000, "left", 500)
    torch.testing.assert_close(many_F, activation_F**3, rtol=1e-3, atol=0)  # the integral


@pytest.mark.parametrize("site", ["before_activation", "after_activation"])
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_attributions_add_up_to_the_change_of_probability(model_type, site, tiny_model, tiny_tokenizer):
    """Completeness, on every family: the sum over a block's units is P(a) - P(0). With and without the prefix cache."""
    # Gemma 2 and GPT-J compute their attention in float32, so there is nothing to gain from more.
    dtype, bound = (torch.float32, 1e-3) if model_type in ("gemma2", "gptj") else (torch.float64, 1e-8)
    model = tiny_model(model_type, dtype=dtype)
    ids = encode(tiny_tokenizer(NATURAL_TOKENIZER[model_type]), REQUEST.text).ids
    with frozen(model):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        scores = {}
        for use_cache in (True, False):
            probability = TokenProbability(model, ids, token, [1], site, use_cache)
            activation_F = probability.activations[1]
            scores[use_cache] = integrated_gradients(
                functools.partial(probability, 1), activation_F, 400, "both_ends", 400
            )
            ends = probability(1, torch.stack([activation_F * 0, activation_F]))
            # Behind a norm, P jumps at zero, so attributions do not add up there.
            if not ARCHITECTURES[model_type].normalizes_mlp_output:
                assert float(scores[use_cache].sum()) == pytest.approx(float(ends[1] - ends[0]), abs=5e-3)
        plain = model(torch.tensor([ids])).logits[0, -1].softmax(0)[token]
    assert float(ends[1]) == pytest.approx(float(plain), abs=1e-5)
    assert relative_error(scores[True], scores[False]) < bound
