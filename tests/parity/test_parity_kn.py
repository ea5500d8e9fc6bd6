"""KN: attributions against EasyEdit's numbers."""

from __future__ import annotations

import pytest
from golden_data import GOLDEN_MODELS, golden_case
from parity import golden_requests, relative_error

from edit_hooks import load_editor

# EasyEdit puts another context before the later tokens of an answer on each family.
RELEASED_CONTEXT = {"tiny-gpt2": "prompt", "tiny-llama": "own"}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_attributions_match_the_release(model_name, engine, golden_model):
    model, tokenizer = golden_model(model_name)
    cases = [golden_case("kn", model_name, f"edit{number}") for number in range(3)]
    settings = {
        "layers": list(range(4)),
        "num_steps": cases[0][0]["steps"],
        "batch_size": 7,
        "answer_context": RELEASED_CONTEXT[model_name],
        "engine": engine,
        "keep_intermediates": True,
    }
    deltas = load_editor("kn", settings).edit(model, tokenizer, golden_requests())
    for request, delta, (case, tensors) in zip(golden_requests(), deltas, cases, strict=True):
        assert (request.text, request.target_true) == (case["prompt"], case["ground_truth"].strip())
        reference = tensors["scores"]
        error = relative_error(delta.intermediates["attributions"][0], reference)
        assert error < 1e-4, f"{request.text}: scores off by {error:.1e}"
        border = (reference - 0.2 * reference.max()).abs() < 1e-4 * reference.max()
        different = {tuple(neuron) for neuron in delta.diagnostics["neurons"]} ^ {
            tuple(neuron) for neuron in case["coarse_neurons"]
        }
        assert all(border[layer, unit] for layer, unit in different), different
