"""KN: attributions against EasyEdit's numbers."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import relative_error

from edit_hooks.editors.kn import KNConfig, attributions, coarse_neurons
from edit_hooks.modeling.hooks import frozen

# EasyEdit puts another context before the later tokens of an answer on each family.
RELEASED_CONTEXT = {"tiny-gpt2": "prompt", "tiny-llama": "own"}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_attributions_match_the_release(model_name, engine, golden_model):
    model, tokenizer = golden_model(model_name)
    for number in range(3):
        case, tensors = golden_case("kn", model_name, f"edit{number}")
        config = KNConfig(
            layers=list(range(4)),
            num_steps=case["steps"],
            batch_size=7,
            answer_context=RELEASED_CONTEXT[model_name],
            engine=engine,
        )
        with frozen(model):
            scores = attributions(model, tokenizer, case["prompt"], f" {case['ground_truth'].strip()}", config)
        error = relative_error(torch.stack([scores[layer] for layer in range(4)]), tensors["scores"])
        assert error < 1e-4, f"edit {number}: scores off by {error:.1e}"
        reference = tensors["scores"]
        border = (reference - 0.2 * reference.max()).abs() < 1e-4 * reference.max()
        ours = {tuple(neuron) for neuron in coarse_neurons(scores, 0.2)}
        different = ours ^ {tuple(neuron) for neuron in case["coarse_neurons"]}
        assert all(border[layer, unit] for layer, unit in different), different
