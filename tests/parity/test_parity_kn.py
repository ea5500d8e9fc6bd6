"""KN against EasyEdit: attributions, whole edits, and units that several prompts share (on GPT-2 EleutherAI's code)."""

from __future__ import annotations

import pytest
from golden_data import GOLDEN_MODELS, golden_case, golden_names
from golden_models import as_stored
from parity import golden_requests, relative_error
from parity_layers import contract

from edit_hooks import EditRequest, load_editor

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


@pytest.mark.parametrize(
    ("model_name", "name"), [(model, name) for model, name in golden_names("kn") if name.startswith("edit-")]
)
def test_a_whole_edit_rewrites_the_units_of_the_release(model_name, name, golden_model):
    """The rows of units where the new answer has one token.

    With several, EasyEdit decodes every greedy token of the old answer and encodes the text again, which gives other
    tokens on a random model (pieces of bytes).
    """
    case, tensors = golden_case("kn", model_name, name)
    model, tokenizer = golden_model(model_name)
    settings = {
        "layers": list(range(4)),
        "num_steps": case["steps"],
        "threshold": case["threshold"],
        "answer_context": RELEASED_CONTEXT[model_name],
        "factors": "easyedit",
    }
    target_new, target_true = case["target_new"].strip(), case["ground_truth"].strip()
    request = EditRequest(prompt=case["prompt"], target_new=target_new, target_true=target_true)
    (delta,) = load_editor("kn", settings).edit(model, tokenizer, [request])
    assert sorted(delta.diagnostics["neurons"]) == case["neurons"]
    if len(tokenizer(case["target_new"])["input_ids"]) > 1:
        return
    for weight, update in delta.weights().items():
        rows = as_stored(model_name, update.T)
        units = [unit for layer, unit in case["neurons"] if f".{layer}." in weight]
        for side, ours in zip(("out", "in"), contract(rows[units]), strict=True):
            assert relative_error(ours, tensors[f"rows.{weight}.{side}"]) < 1e-5, weight


# Every packed run, and every share on one of them.
SHARES = [
    ("tiny-gpt2", "refine-0", "0.3"),
    ("tiny-gpt2", "refine-0", "0.5"),
    ("tiny-gpt2", "refine-1", "0.7"),
    ("tiny-llama", "refine-0", "0.5"),
    ("tiny-llama", "refine-1", "0.3"),
]


@pytest.mark.parametrize(("model_name", "name", "share"), SHARES)
def test_units_of_several_prompts_are_those_of_the_release(model_name, name, share, golden_model):
    """Those above 0.3 of the largest score for more than a share of four prompts, which may be none."""
    case, tensors = golden_case("kn", model_name, name)
    model, tokenizer = golden_model(model_name)
    first, *further = case["prompts"]
    settings = {
        "layers": list(range(4)),
        "num_steps": case["steps"],
        "threshold": case["coarse_adaptive_threshold"],
        "answer_context": "own",
        "sharing": float(share),
        "paraphrases": {first: further},
        "keep_intermediates": True,
    }
    request = EditRequest(prompt=first, target_new="English", target_true=case["ground_truth"].strip())
    editor, wanted = load_editor("kn", settings), case["refined_by_p"][share]
    (delta,) = editor.edit(model, tokenizer, [request])
    assert sorted(delta.diagnostics["neurons"]) == wanted
    for number, scores in enumerate(delta.intermediates["attributions"]):
        for side, ours in zip(("out", "in"), contract(scores), strict=True):
            assert relative_error(ours, tensors[f"scores{number}.{side}"]) < 1e-4, number
