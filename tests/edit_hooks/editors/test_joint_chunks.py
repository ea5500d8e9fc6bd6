"""Joint edits of more requests than `batch_size`, against plain loops: one Adam step per chunk and pass."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, NATURAL_TOKENIZER, REQUESTS
from edit_hooks.editors.lora import LoRAConfig, initial_adapters
from edit_hooks.modeling.tokens import split_continuation

TARGETS = ("French", "Karsk", "trumpet")  # 3, 1 and 3 tokens
EDIT_REQUESTS = [EditRequest(**{**record, "target_new": new}) for record, new in zip(REQUESTS, TARGETS, strict=False)]
CHUNKS = (EDIT_REQUESTS[:2], EDIT_REQUESTS[2:])
NUM_STEPS, LR = 4, 5e-3
engines = pytest.mark.parametrize("engine", ["fast", "reference"])


def token_nll(model, tokenizer, request, objective="target_tokens"):
    """NLL of every target token, one plain forward of one row."""
    prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    if objective == "last_token":
        return -model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[target]
    logprob = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return -logprob[torch.arange(len(target)), target]


def fine_tuned(model, tokenizer, objective, early_stop_loss):
    """(updates by name, mean loss of every pass, number of steps): a chunk below the bound is not stepped."""
    model = copy.deepcopy(model)
    module = ARCHITECTURES[model.config.model_type].rewrite_name(EDIT_LAYER)
    trained = {name: value for name, value in model.named_parameters() if name.startswith(f"{module}.")}
    start = {name: value.detach().clone() for name, value in trained.items()}
    optimizer = torch.optim.Adam(trained.values(), lr=LR)
    losses, num_steps = [], 0
    for _ in range(NUM_STEPS):
        of_requests = []
        for chunk in CHUNKS:
            each = torch.stack([token_nll(model, tokenizer, request, objective).mean() for request in chunk])
            of_requests += each.tolist()
            if float(each.detach().mean()) >= early_stop_loss:
                optimizer.zero_grad()
                each.mean().backward()
                optimizer.step()
                num_steps += 1
        losses.append(sum(of_requests) / len(of_requests))
        if losses[-1] < early_stop_loss:
            break
    return {name: value.detach() - start[name] for name, value in trained.items()}, losses, num_steps


@engines
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize(("editor", "objective"), [("ft_m", "target_tokens"), ("ft_l", "last_token")])
def test_every_chunk_of_a_joint_fine_tuning_is_stepped(
    editor, objective, model_type, engine, tiny_model, tiny_tokenizer
):
    """Also with a bound between the losses of the chunks, below which a chunk only counts."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    with torch.no_grad():
        at_start = [
            sum(float(token_nll(model, tokenizer, request, objective).mean()) for request in chunk) / len(chunk)
            for chunk in CHUNKS
        ]
    steps = {}
    for bound in (0.0, sum(at_start) / 2):
        settings = {"layers": [EDIT_LAYER], "num_steps": NUM_STEPS, "lr": LR, "batch_size": 2, "engine": engine}
        settings["early_stop_loss"] = bound
        (delta,) = load_editor(editor, settings).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
        expected, losses, steps[bound] = fine_tuned(model, tokenizer, objective, bound)
        assert delta.diagnostics["steps"] == steps[bound]
        assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(losses, abs=1e-8)
        assert delta.weights().keys() == expected.keys()
        for name, update in delta.weights().items():
            torch.testing.assert_close(update, expected[name], atol=1e-8, rtol=1e-6)
        if bound == 0:
            (shorter,) = load_editor(editor, settings).edit(model, tokenizer, EDIT_REQUESTS[:2], joint=True)
            assert shorter.checksum() != delta.checksum()
    assert steps[0.0] == len(CHUNKS) * NUM_STEPS > steps[bound] > 0


def lora_trained(model, tokenizer, config):
    """(updates by name, loss per token of every pass), the adapters as plain products beside their maps."""
    names = [f"model.layers.{EDIT_LAYER}.self_attn.{projection}_proj" for projection in "qv"]
    adapters = {}
    for name, adapter in initial_adapters(model, names, config).items():
        adapters[name] = [tensor.clone().requires_grad_() for tensor in (adapter.A, adapter.B)]
    scale = config.alpha / config.rank

    def adding(name):
        a, b = adapters[name]
        return lambda _module, args, output: output + scale * args[0] @ a.T @ b.T

    handles = [model.get_submodule(name).register_forward_hook(adding(name)) for name in names]
    optimizer = torch.optim.Adam([tensor for pair in adapters.values() for tensor in pair], lr=config.lr)
    losses = []
    try:
        for step in range(config.num_steps + 1):
            of_tokens = []
            for chunk in CHUNKS:
                each = torch.cat([token_nll(model, tokenizer, request) for request in chunk])
                of_tokens += each.tolist()
                if step < config.num_steps:
                    optimizer.zero_grad()
                    each.mean().backward()
                    optimizer.step()
            losses.append(sum(of_tokens) / len(of_tokens))
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return {f"{name}.weight": scale * (b @ a).detach() for name, (a, b) in adapters.items()}, losses


@engines
def test_every_chunk_of_a_joint_adapter_is_stepped(engine, tiny_model, tiny_tokenizer):
    """The loss is the mean over a chunk's tokens, not over its requests."""
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    counts = [len(split_continuation(tokenizer, r.text, f" {r.target_new}")[1]) for r in EDIT_REQUESTS]
    assert counts == [3, 1, 3]
    settings = {"layers": [EDIT_LAYER], "num_steps": NUM_STEPS, "lr": LR, "batch_size": 2, "dropout": 0.0}
    (delta,) = load_editor("lora", {**settings, "engine": engine}).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    expected, losses = lora_trained(model, tokenizer, LoRAConfig(**settings))
    assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(losses, abs=1e-8)
    assert delta.weights().keys() == expected.keys()
    for name, update in delta.weights().items():
        torch.testing.assert_close(update, expected[name], atol=1e-8, rtol=1e-6)
    (shorter,) = load_editor("lora", settings).edit(model, tokenizer, EDIT_REQUESTS[:2], joint=True)
    assert shorter.checksum() != delta.checksum()
