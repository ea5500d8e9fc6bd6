"""Independent edits that train side by side give the numbers of a plain loop that makes one edit at a time."""

from __future__ import annotations

import contextlib

import pytest
import torch

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, NUM_LAYERS
from edit_hooks.gradient import side_by_side
from edit_hooks.modeling import memory
from edit_hooks.modeling.forward import kv_cache

# Rows of 3 to 20 tokens, targets of one and several tokens, and one text twice.
REQUESTS = [
    EditRequest(prompt="The capital of Ostravia is", target_new="Velm or Karsk"),
    EditRequest(prompt="He speaks", target_new="French"),
    EditRequest(prompt="What instrument does Tomas Ferrier play? The", target_new="trumpet"),
    EditRequest(prompt="He speaks", target_new="French"),
    EditRequest(prompt="The red lighthouse was built by the engineer", target_new="Zoë Brandt in 2003"),
]
LAST = NUM_LAYERS - 1
SETTINGS = {
    "ft_m": {"layers": [EDIT_LAYER], "num_steps": 4, "lr": 5e-3, "weight_decay": 0.01},
    "ft_m, last block and a ball": {"layers": [LAST], "num_steps": 3, "lr": 5e-3, "norm_constraint": 4e-3},
    "ft_m, all blocks": {"layers": list(range(NUM_LAYERS)), "num_steps": 2, "lr": 5e-3, "append_eos": True},
    "lora": {"layers": [EDIT_LAYER, LAST], "num_steps": 3, "lr": 5e-3, "rank": 3, "dropout": 0.2},
    "lora, adalora on all maps": {
        "layers": [EDIT_LAYER, LAST],
        "kind": "adalora",
        "modules": ["query_value", "attention_out", "mlp_in", "rewrite"],
        "num_steps": 2,
        "dropout": 0.1,
    },
    "mend": {"layers": [EDIT_LAYER, LAST], "artifact": "identity", "edit_lr": 0.05, "batch_size": 5},
    "ft_l": {"layers": [EDIT_LAYER], "num_steps": 3, "lr": 5e-3},
}


def edits(name, model, tokenizer, engine, requests=REQUESTS, **changes):
    editor = load_editor(name.partition(",")[0], {**SETTINGS[name], "engine": engine, **changes})
    return editor.edit(model, tokenizer, requests, measure=False)


def assert_same_edits(ours, expected, bound=1e-10):
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        assert one.diagnostics["steps"] == other.diagnostics["steps"]
        assert one.diagnostics["stop_reason"] == other.diagnostics["stop_reason"]
        losses, others = ([record["loss"] for record in delta.diagnostics["losses"]] for delta in (one, other))
        assert losses == pytest.approx(others, abs=bound)
        weights, expected_weights = one.weights(), other.weights()
        assert weights.keys() == expected_weights.keys()
        for parameter, update in weights.items():
            difference = (update - expected_weights[parameter]).norm() / expected_weights[parameter].norm()
            assert float(difference) < 10 * bound, parameter


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_edits_of_a_batch_are_those_of_the_plain_loop(model_type, name, tiny_model, tiny_tokenizer):
    """On every family, in float64.

    Gemma 2 and GPT-J take the attention's softmax in float32, where Gemma's mask of a float64 model is infinite. In
    float32 Adam's first steps turn gradients of the size of rounding errors into steps of the size of lr.
    """
    dtype = torch.float32 if model_type == "gemma2" else torch.float64
    bound = {"gemma2": 1e-3, "gptj": 1e-6}.get(model_type, 1e-10)
    model, tokenizer = tiny_model(model_type, dtype=dtype), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    ours, expected = (edits(name, model, tokenizer, engine) for engine in ("fast", "reference"))
    assert_same_edits(ours, expected, bound)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_number_of_edits_per_batch_changes_nothing(name, tiny_model, tiny_tokenizer, monkeypatch):
    """With memory for one edit, and in groups without padding."""
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    together = edits(name, model, tokenizer, "fast")
    monkeypatch.setattr(kv_cache, "MAX_PADDING_CPU", 0)
    assert_same_edits(edits(name, model, tokenizer, "fast"), together)
    monkeypatch.setattr(side_by_side, "free_bytes", lambda device: 0)
    assert_same_edits(edits(name, model, tokenizer, "fast"), together)
    assert_same_edits(edits(name, model, tokenizer, "fast", REQUESTS[:1]), together[:1])


def test_finished_edits_leave_and_the_others_go_on(tiny_model, tiny_tokenizer):
    """Edits stop at different steps, each where it does alone, with its own Adam state."""
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    changes = {"num_steps": 25, "lr": 2e-2, "early_stop_loss": 4.0}
    ours, expected = (edits("ft_m", model, tokenizer, engine, **changes) for engine in ("fast", "reference"))
    print(
        [
            (delta.diagnostics["steps"], delta.diagnostics["losses"][-1], delta.diagnostics["losses"][0])
            for delta in ours
        ]
    )
    assert len({delta.diagnostics["steps"] for delta in ours}) > 2
    assert {delta.diagnostics["stop_reason"] for delta in ours} == {"loss"}
    assert_same_edits(ours, expected)
    finished = []
    load_editor("ft_m", SETTINGS["ft_m"] | changes).edit(model, tokenizer, REQUESTS, progress=finished.append)
    assert sum(finished) == len(REQUESTS)


def test_an_edit_that_needs_no_step_keeps_the_weights(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    for delta in edits("ft_m", model, tokenizer, "fast", early_stop_loss=1e3):
        assert delta.diagnostics["steps"] == 0 and delta.diagnostics["stop_reason"] == "loss"
        assert not any(update.any() for update in delta.weights().values())


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "mend"])
def test_edits_of_a_batch_share_forward_passes(name, tiny_model, tiny_tokenizer):
    """What lies below the trained map runs once; a step of all edits is one pass per group of similar length."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    with counted_calls({"lowest": model.model.layers[0].self_attn.k_proj, "norm": model.model.norm}) as calls:
        deltas = edits(name, model, tokenizer, "fast", **({"early_stop_loss": 0.0} if name.startswith("ft") else {}))
    num_groups = len(kv_cache.group_by_length(row_lengths(name, tokenizer), 24))
    num_steps = SETTINGS[name]["num_steps"]
    assert all(delta.diagnostics["steps"] == num_steps for delta in deltas)
    num_passes = num_steps + name.startswith("lora")  # a last one records the loss
    assert calls["norm"] == num_groups * num_passes
    assert calls["lowest"] == num_groups


def test_edits_of_mend_share_two_passes_and_the_network(tiny_model, tiny_tokenizer):
    """One for the gradients, one for the losses after the edits; the network sees the tokens of all edits at once."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    requests = [EditRequest(prompt="The train", target_new=target) for target in ("is", "to", "of")]
    editor = load_editor("mend", SETTINGS["mend"])
    editor.edit(model, tokenizer, requests[:1], measure=False)
    (network,) = editor._networks.values()
    watched = {"lowest": model.model.layers[0].self_attn.k_proj, "norm": model.model.norm}
    blocks = {"network": next(iter(network.networks.values())).blocks[0]}
    with counted_calls(watched) as calls, counted_calls(blocks) as network_calls:
        deltas = editor.edit(model, tokenizer, requests, measure=False)
    assert len(deltas) == 3 and all(delta.is_low_rank for delta in deltas)
    assert calls == {"lowest": 1, "norm": 2}
    shape = next(iter(network.shapes.values()))
    assert network_calls["network"] == list(network.shapes.values()).count(shape)


def test_the_number_of_edits_per_batch_follows_the_memory(tiny_model, monkeypatch):
    """Four times the trained parameters and the activations of an edit's tokens, in half of the free memory."""
    model = tiny_model("llama")
    trained, lengths = 10_000, [5, 9, 7, 5, 6]
    cost = 4 * trained + 9 * memory.bytes_per_token(model)

    def sizes(free):
        monkeypatch.setattr(side_by_side, "free_bytes", lambda device: free)
        batches = side_by_side.split_edits(model, lengths, trained)
        assert sorted(edit for batch in batches for group in batch for edit in group) == [0, 1, 2, 3, 4]
        return [sum(map(len, batch)) for batch in batches]

    assert sizes(None) == [5] and sizes(2**40) == [5]
    assert max(sizes(2 * 2 * cost)) == 2 and sizes(0) == [1] * 5
    assert memory.free_bytes(torch.device("cpu")) is None or memory.free_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setattr(side_by_side, "SMALL_BUDGET", 0)  # then at most the size of the weights
    many = memory.weight_bytes(model)
    assert [sum(map(len, batch)) for batch in side_by_side.split_edits(model, lengths, many)] == [1] * 5


@contextlib.contextmanager
def counted_calls(modules):
    """Counts of the calls of some modules by name."""
    calls = dict.fromkeys(modules, 0)
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        for name, module in modules.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def row_lengths(name, tokenizer):
    """Tokens of the rows: prompt and target without its last token, with append_eos whole; or the prompt alone."""
    texts = [(request.text, request.text + request.continuation) for request in REQUESTS]
    if name == "ft_l":
        return [len(tokenizer(prompt)["input_ids"]) for prompt, _ in texts]
    shorter = 0 if SETTINGS[name].get("append_eos") else 1
    return [len(tokenizer(text)["input_ids"]) - shorter for _, text in texts]
