"""KN: attributions against EasyEdit's numbers and against calculus, selection, the two ways of rewriting, undo."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import relative_error
from state import assert_same_state, snapshot
from tiny import ALL_MODEL_TYPES, NATURAL_TOKENIZER, NUM_LAYERS, REQUESTS

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.editors.kn import KNConfig, Neuron, attributions, choose, coarse, integrated_gradients
from edit_hooks.editors.kn import _Probability as Probability
from edit_hooks.modeling.architectures import ARCHITECTURES, is_transposed
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.sampling import greedy_continuation
from edit_hooks.modeling.tokens import encode, split_continuation

LAYERS = list(range(NUM_LAYERS))
REQUEST = EditRequest(**REQUESTS[0])
# The release asks for the tokens of the answer in another way on each family.
RELEASED = {"tiny-gpt2": "prompt", "tiny-llama": "own"}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_attributions_are_those_of_the_release(model_name, engine, golden_model):
    model, tokenizer = golden_model(model_name)
    for number in range(3):
        case, tensors = golden_case("kn", model_name, f"edit{number}")
        config = KNConfig(
            layers=list(range(4)),
            num_steps=case["steps"],
            batch_size=7,
            answer_context=RELEASED[model_name],
            engine=engine,
        )
        with frozen(model):
            scores = attributions(model, tokenizer, case["prompt"], case["ground_truth"].strip(), config)
        error = relative_error(torch.stack([scores[layer] for layer in range(4)]), tensors["scores"])
        assert error < 1e-4, f"edit {number}: scores off by {error:.1e}"
        reference = tensors["scores"]
        border = (reference - 0.2 * reference.max()).abs() < 1e-4 * reference.max()
        ours = {tuple(neuron) for neuron in coarse(scores, 0.2)}
        different = ours ^ {tuple(neuron) for neuron in case["coarse_neurons"]}
        assert all(border[layer, unit] for layer, unit in different), different


def test_a_linear_function_is_attributed_exactly_and_a_cubic_one_by_its_sum():
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
    """Completeness, on every family: the sum over a block's units is P(a) - P(0). Both engines agree."""
    # Gemma 2 and GPT-J compute their attention in float32, so there is nothing to gain from more.
    dtype, bound = (torch.float32, 1e-3) if model_type in ("gemma2", "gptj") else (torch.float64, 1e-8)
    model = tiny_model(model_type, dtype=dtype)
    ids = encode(tiny_tokenizer(NATURAL_TOKENIZER[model_type]), REQUEST.text).ids
    config = KNConfig(layers=[1], num_steps=400, batch_size=400, site=site)
    reference = KNConfig(layers=[1], num_steps=400, batch_size=400, site=site, engine="reference")
    with frozen(model):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        found = {}
        for chosen in (config, reference):
            probability = Probability(model, ids, token, chosen)
            activation_F = probability.activations[1]
            found[chosen.engine] = integrated_gradients(
                lambda rows, probability=probability: probability(1, rows), activation_F, 400, "both_ends", 400
            )
            ends = probability(1, torch.stack([activation_F * 0, activation_F]))
            if not ARCHITECTURES[model_type].normalizes_mlp_output:  # there P jumps at zero, see the module
                assert float(found[chosen.engine].sum()) == pytest.approx(float(ends[1] - ends[0]), abs=5e-3)
        plain = model(torch.tensor([ids])).logits[0, -1].softmax(0)[token]
    assert float(ends[1]) == pytest.approx(float(plain), abs=1e-5)
    assert relative_error(found["fast"], found["reference"]) < bound


def test_units_are_chosen_by_share_of_the_largest_and_by_how_many_prompts_agree():
    first = {0: torch.tensor([1.0, 0.3, 0.1]), 1: torch.tensor([0.21, 0.0, -2.0])}
    assert coarse(first, 0.2) == [Neuron(0, 0), Neuron(0, 1), Neuron(1, 0)]
    assert coarse({0: torch.tensor([-1.0, 0.0])}, 0.2) == []
    second = {0: torch.tensor([1.0, 0.0, 0.0]), 1: torch.tensor([0.9, 0.0, 0.0])}
    assert choose([first], KNConfig()) == ([Neuron(0, 0), Neuron(0, 1), Neuron(1, 0)], None)
    assert choose([first, second], KNConfig(sharing=0.6)) == ([Neuron(0, 0), Neuron(1, 0)], 0.6)
    lone = {0: torch.tensor([1.0, 0.0, 0.0]), 1: torch.zeros(3)}
    assert choose([first, second, lone], KNConfig(sharing=0.7)) == ([Neuron(0, 0)], 0.7)
    adjusted = choose([first, second, lone], KNConfig(sharing=0.7, sharing_adjustments=6))
    assert adjusted == ([Neuron(0, 0), Neuron(1, 0)], 0.65)


def test_one_step_is_refused():
    with pytest.raises(EditingError, match="at least 2 points"):
        load_editor("kn", {"num_steps": 1})


def test_the_old_answer_is_needed(tiny_model, tiny_tokenizer):
    request = EditRequest(prompt="Water boils at", target_new="zero", case_id="7")
    with pytest.raises(EditingError, match=r"case 7.*target_true"):
        load_editor("kn", {"layers": [1]}).edit(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), [request])


@pytest.mark.parametrize("factors", ["original", "easyedit", "easyedit_single"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "phi3", "gemma3_text"])
def test_output_vectors_are_rewritten_as_stated(model_type, factors, tiny_model, tiny_tokenizer):
    """Written out for every chosen unit, in float64; all other output vectors stay as they are."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    (delta,) = load_editor("kn", {"layers": LAYERS, "factors": factors}).edit(model, tokenizer, [REQUEST])
    assert_same_state(before, snapshot(model, tokenizer))
    chosen = [tuple(neuron) for neuron in delta.diagnostics["neurons"]]
    assert 0 < len(chosen) == delta.diagnostics["num_neurons"] and delta.is_low_rank and delta.rank == 1
    embedding = model.get_input_embeddings().weight.detach()
    _, new = split_continuation(tokenizer, REQUEST.text, f" {REQUEST.target_new}")
    _, true = split_continuation(tokenizer, REQUEST.text, f" {REQUEST.target_true}")
    old = greedy_continuation(model, encode(tokenizer, REQUEST.text).ids, len(new))
    updates = delta.weights()
    for layer in LAYERS:
        name = ARCHITECTURES[model_type].rewrite_name(layer)
        module = model.get_submodule(name)
        weight = module.weight.detach().T if is_transposed(module) else module.weight.detach()
        expected = torch.zeros_like(weight)
        for unit in (unit for where, unit in chosen if where == layer):
            r = weight[:, unit]
            if factors == "original":
                away, towards = embedding[true].mean(0), embedding[new].mean(0)
                expected[:, unit] = r.norm() * (8 * towards / towards.norm() - away / away.norm())
            else:
                expected[:, unit] = embedding[new].sum(0) * (2 if factors == "easyedit_single" else 1)
                expected[:, unit] -= embedding[old].sum(0) * (2 if len(old) == 1 else 1)
        ours = updates.get(f"{name}.weight", torch.zeros_like(module.weight))
        torch.testing.assert_close(ours.T if is_transposed(module) else ours, expected, atol=1e-8, rtol=1e-8)


def test_a_stream_is_undone_bit_for_bit(tiny_model, tiny_tokenizer):
    """The second edit is made on the first one's weights; both go away in reverse order and together."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    editor = load_editor("kn", {"layers": LAYERS, "context_templates": ["{}", "You can see. {}"], "sharing": 0.5})
    requests = [EditRequest(**record) for record in REQUESTS[:2]]
    before = snapshot(model, tokenizer)
    (first,) = editor.edit(model, tokenizer, requests[:1])
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, requests[1:], history=[first])
        middle = snapshot(model, tokenizer)
        with edited(model, second):
            pass
        assert_same_state(middle, snapshot(model, tokenizer))
    (alone,) = editor.edit(model, tokenizer, requests[1:])
    assert alone.checksum() != second.checksum()
    with edited(model, first, second):
        pass
    assert_same_state(before, snapshot(model, tokenizer))
