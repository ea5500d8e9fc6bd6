"""KN: selection of units, the ways of rewriting them, streams, and bad requests."""

from __future__ import annotations

import pytest
import torch
from state import assert_same_state
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, NUM_LAYERS, REQUESTS
from edit_hooks.editors.kn import LONG_TARGET, LONG_TARGET_WARNING, KNConfig, Neuron, coarse_neurons, select_neurons
from edit_hooks.modeling.architectures import is_transposed
from edit_hooks.modeling.forward.sampling import greedy_continuation
from edit_hooks.modeling.tokens import encode, split_continuation
from edit_hooks.utils.errors import UnusableRequestError

LAYERS = list(range(NUM_LAYERS))
REQUEST = EditRequest(**REQUESTS[0])


def test_units_are_selected_by_threshold_and_by_sharing():
    first = {0: torch.tensor([1.0, 0.3, 0.1]), 1: torch.tensor([0.21, 0.0, -2.0])}
    assert coarse_neurons(first, 0.2) == [Neuron(0, 0), Neuron(0, 1), Neuron(1, 0)]
    assert coarse_neurons({0: torch.tensor([-1.0, 0.0])}, 0.2) == []
    second = {0: torch.tensor([1.0, 0.0, 0.0]), 1: torch.tensor([0.9, 0.0, 0.0])}
    assert select_neurons([first], KNConfig()) == ([Neuron(0, 0), Neuron(0, 1), Neuron(1, 0)], None)
    assert select_neurons([first, second], KNConfig(sharing=0.6)) == ([Neuron(0, 0), Neuron(1, 0)], 0.6)
    lone = {0: torch.tensor([1.0, 0.0, 0.0]), 1: torch.zeros(3)}
    assert select_neurons([first, second, lone], KNConfig(sharing=0.7)) == ([Neuron(0, 0)], 0.7)
    adjusted = select_neurons([first, second, lone], KNConfig(sharing=0.7, sharing_adjustments=6))
    assert adjusted == ([Neuron(0, 0), Neuron(1, 0)], 0.65)


def test_one_step_is_refused():
    with pytest.raises(EditingError, match="at least 2 is needed"):
        load_editor("kn", {"num_steps": 1})


def test_the_update_grows_with_the_target_and_long_targets_get_one_warning(tiny_model, tiny_tokenizer, caplog):
    """Recorded with every long edit and logged once; the original's update is in norms of the output vector."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    targets = ["Rome", "Rome and Paris and Berlin", "Rome and Paris and Berlin and Rome and Paris and Berlin"]
    requests = [EditRequest(prompt=REQUEST.text, target_new=text, target_true="Paris") for text in targets]
    editor = load_editor("kn", {"layers": LAYERS})
    with caplog.at_level("WARNING"):
        deltas = editor.edit(model, tokenizer, requests)
    warnings = [delta.warnings for delta in deltas]
    assert warnings == [[], [LONG_TARGET_WARNING], [LONG_TARGET_WARNING]]
    assert sum("grows with the length" in record.message for record in caplog.records) == 1
    counts = [delta.diagnostics["target_tokens"] for delta in deltas]
    assert counts[0] <= LONG_TARGET < counts[1] < counts[2]
    norms = [max(float(factor.left.norm()) for factor in delta.factors.values()) for delta in deltas]
    assert norms[0] < norms[1] < norms[2]
    original = load_editor("kn", {"layers": LAYERS, "factors": "original"}).edit(model, tokenizer, requests[2:])
    assert not original[0].warnings


def test_missing_old_answer_is_refused(tiny_model, tiny_tokenizer):
    request = EditRequest(prompt="Water boils at", target_new="zero", case_id="7")
    with pytest.raises(EditingError, match=r"case 7.*target_true"):
        load_editor("kn", {"layers": [1]}).edit(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), [request])


@pytest.mark.parametrize(
    ("settings", "old_answer", "fits"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"answer_context": "own"}, 2, False),
        ({"answer_context": "prompt"}, 2, True),
        ({"context_templates": ["{}", "a a {}"]}, 1, False),
        ({"paraphrases": {"PROMPT": [" ".join(["a"] * 130)]}}, 1, False),
    ],
)
def test_all_texts_that_are_run_have_to_fit(settings, old_answer, fits, tiny_model, tiny_tokenizer):
    """The old answer is attributed in every template and after every paraphrase, not the new one alone."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    limit = model.config.max_position_embeddings
    request = EditRequest(prompt="a" + " a" * (limit - 1), target_new="a", target_true=" ".join(["a"] * old_answer))
    assert len(encode(tokenizer, request.text + request.continuation).ids) == limit + 1
    settings = {
        name: value if name != "paraphrases" else {request.text: value["PROMPT"]} for name, value in settings.items()
    }
    editor = load_editor("kn", {"layers": [1], "num_steps": 2, **settings})
    if fits:
        editor.edit(model, tokenizer, [request])
        return
    assert "target_true" in editor.find_unusable(tokenizer, [request], limit, model)[request.key]
    # Without a model, what its file has for answer_context is unknown: nothing is refused for the default's sake.
    assert bool(editor.find_unusable(tokenizer, [request], limit)) == (bool(settings) or old_answer > 2)
    with pytest.raises(UnusableRequestError, match=rf"target_true.* take \d+ tokens.*has {limit} positions"):
        editor.edit(model, tokenizer, [request])
    wrapper = load_editor("rect", {"base": "kn", "layers": [1], "base_settings": settings})
    assert wrapper.find_unusable(tokenizer, [request], limit, model).keys() == {request.key}


MLP_MATRICES = {  # the first one and the rewrite module
    "gpt2": ("transformer.h.{}.mlp.c_fc", "transformer.h.{}.mlp.c_proj"),
    "llama": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.down_proj"),
}


def plain_attribution(model, module, at_output, ids, token, points):
    """Attr of the units of one block, one full forward pass per point."""
    kept = {}

    def read(_module, args, output):
        kept["activation"] = (output if at_output else args[0])[0, -1].detach()

    def scaled(_module, hidden):
        hidden = hidden.clone()
        hidden[0, -1] = kept["scaled"]
        return hidden

    handle = module.register_forward_hook(read)
    model(torch.tensor([ids]))
    handle.remove()
    if at_output:
        handle = module.register_forward_hook(lambda module, args, output: scaled(module, output))
    else:
        handle = module.register_forward_pre_hook(lambda module, args: (scaled(module, args[0]),))
    total = torch.zeros_like(kept["activation"])
    try:
        for point in points:
            kept["scaled"] = (point * kept["activation"]).requires_grad_()
            probability = model(torch.tensor([ids])).logits[0, -1].softmax(0)[token]
            total += torch.autograd.grad(probability, kept["scaled"])[0]
    finally:
        handle.remove()
    return kept["activation"] * total / len(points)


@pytest.mark.parametrize("site", ["before_activation", "after_activation"])
@pytest.mark.parametrize(
    ("riemann", "points"), [("both_ends", [0, 1 / 3, 2 / 3, 1]), ("left", [0, 1 / 4, 1 / 2, 3 / 4])]
)
@pytest.mark.parametrize("model_type", list(MLP_MATRICES))
def test_attributions_are_those_of_a_plain_loop(model_type, riemann, points, site, tiny_model, tiny_tokenizer):
    """Over the tokens of the old answer, each after those before it, and the points of the integral."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    request = EditRequest(**{**REQUESTS[0], "target_true": "Karsk Velm"})
    prompt, answer = split_continuation(tokenizer, request.text, f" {request.target_true}")
    assert len(answer) == 2
    settings = {"layers": LAYERS, "num_steps": 4, "batch_size": 3, "site": site, "riemann": riemann}
    (delta,) = load_editor("kn", {**settings, "keep_intermediates": True}).edit(model, tokenizer, [request])
    (ours,) = delta.intermediates["attributions"]
    for layer in LAYERS:
        at_output = site == "before_activation"
        module = model.get_submodule(MLP_MATRICES[model_type][not at_output].format(layer))
        expected = sum(
            plain_attribution(model, module, at_output, prompt + answer[:index], token, points)
            for index, token in enumerate(answer)
        )
        torch.testing.assert_close(ours[layer], expected / len(answer), atol=1e-12, rtol=1e-6)


@pytest.mark.parametrize(
    ("factors", "weights"),
    [("original", {}), ("original", {"erase": 0.5, "write": 3.0}), ("easyedit", {}), ("easyedit_single", {})],
)
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "phi3", "gemma3_text"])
def test_output_vectors_are_rewritten_by_the_formula(model_type, factors, weights, tiny_model, tiny_tokenizer):
    """Written out for every selected unit, in float64; no other output vector changes."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    settings = {"layers": LAYERS, "factors": factors, **weights}
    (delta,) = load_editor("kn", settings).edit(model, tokenizer, [REQUEST])
    assert_same_state(before, snapshot(model, tokenizer))
    selected = [tuple(neuron) for neuron in delta.diagnostics["neurons"]]
    assert 0 < len(selected) == delta.diagnostics["num_neurons"] and delta.is_low_rank and delta.rank == 1
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
        for unit in (unit for where, unit in selected if where == layer):
            r = weight[:, unit]
            if factors == "original":
                away, towards = embedding[true].mean(0), embedding[new].mean(0)
                write, erase = weights.get("write", 8), weights.get("erase", 1)
                expected[:, unit] = r.norm() * (write * towards / towards.norm() - erase * away / away.norm())
            else:
                expected[:, unit] = embedding[new].sum(0) * (2 if factors == "easyedit_single" else 1)
                expected[:, unit] -= embedding[old].sum(0) * (2 if len(old) == 1 else 1)
        ours = updates.get(f"{name}.weight", torch.zeros_like(module.weight))
        torch.testing.assert_close(ours.T if is_transposed(module) else ours, expected, atol=1e-8, rtol=1e-8)


def test_a_stream_is_restored_bit_for_bit(tiny_model, tiny_tokenizer):
    """The second edit is made on the first one's weights; both are removed in reverse order, and together."""
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
