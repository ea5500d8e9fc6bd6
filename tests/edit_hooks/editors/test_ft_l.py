"""FT-L: the last-token objective, released targets, and its code shared with FT-M."""

from __future__ import annotations

import math

import pytest
import torch
from state import assert_same_state

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, build_model
from edit_hooks.editors.ft_l import FTLConfig
from edit_hooks.editors.ft_m import FTConfig
from edit_hooks.modeling.tokens import encode, split_continuation

PROMPT = "The capital of Ostravia is"


def test_two_target_tokens_bound_the_loss_by_log_2(tiny_tokenizer):
    """The mistake in the objective: the mass is spread over both tokens, and the early stop never fires."""
    model, tokenizer = build_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # or a random head of width 32 could not put all its mass on two tokens
    _, target = split_continuation(tokenizer, PROMPT, " is the")
    assert len(set(target)) == len(target) == 2
    request = EditRequest(prompt=PROMPT, target_new="is the")
    config = {"layers": [EDIT_LAYER], "lr": 2e-2, "num_steps": 150}
    (delta,) = load_editor("ft_l", config=config).edit(model, tokenizer, [request])
    losses = [record["loss"] for record in delta.diagnostics["losses"]]
    assert min(losses) >= math.log(2) - 1e-12 and losses[-1] == pytest.approx(math.log(2), abs=0.02)
    assert delta.diagnostics["stop_reason"] == "steps" and delta.diagnostics["steps"] == 150
    (other,) = load_editor("ft_m", config=config).edit(model, tokenizer, [request])
    assert other.diagnostics["stop_reason"] == "loss" and other.diagnostics["final_loss"] < 1e-2


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_the_loss_is_the_mean_at_the_last_prompt_token(model_type, tiny_model, tiny_tokenizer):
    """On every family, in a batch of prompts of different length, against a plain forward of each prompt.

    Gemma 2 takes its softmax in float32, where the mask of a float64 model is infinite: it is tested in float32.
    """
    dtype, bound = (torch.float32, 1e-4) if model_type == "gemma2" else (torch.float64, 1e-8)
    model, tokenizer = tiny_model(model_type, dtype=dtype), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    requests = [
        EditRequest(prompt=PROMPT, target_new="Lisbon"),
        EditRequest(prompt="What instrument does Tomas Ferrier play? The", target_new="violin"),
    ]
    expected = []
    for request in requests:
        prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
        with torch.no_grad():
            logprob_V = model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
        expected.append(-float(logprob_V[target].mean()))
    radius = 3e-3
    config = {"layers": [EDIT_LAYER], "lr": 5e-3, "num_steps": 3, "norm_constraint": radius, "batch_size": 2}
    for side in ("left", "right"):
        tokenizer.padding_side = side
        before = snapshot(model, tokenizer)
        (delta,) = load_editor("ft_l", config=config).edit(model, tokenizer, requests, joint=True)
        assert delta.diagnostics["losses"][0]["loss"] == pytest.approx(sum(expected) / 2, abs=bound)
        assert 0 < max(float(update.abs().max()) for update in delta.weights().values()) <= radius * (1 + 1e-4)
        with edited(model, delta), edited(model, delta):
            pass
        assert_same_state(before, snapshot(model, tokenizer))


def test_released_targets_contain_a_bos(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    request = EditRequest(prompt=PROMPT, target_new="Rome")
    config = {"layers": [EDIT_LAYER], "num_steps": 1, "targets": "alone"}
    (delta,) = load_editor("ft_l", config=config).edit(model, tokenizer, [request])
    with torch.no_grad():
        logprob_V = model(torch.tensor([encode(tokenizer, PROMPT).ids])).logits[0, -1].log_softmax(0)
    target = tokenizer(" Rome")["input_ids"]
    assert target[0] == tokenizer.bos_token_id
    assert delta.diagnostics["losses"][0]["loss"] == pytest.approx(-float(logprob_V[target].mean()), abs=1e-9)


def test_objective_is_the_only_difference_from_ft_m(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("gpt2", dtype=torch.float64), tiny_tokenizer("byte_bpe")
    request = EditRequest(prompt=PROMPT, target_new="Lisbon")
    settings = {"layers": [EDIT_LAYER], "num_steps": 3}
    (one,) = load_editor("ft_l", {**settings, "objective": "target_tokens"}).edit(model, tokenizer, [request])
    (two,) = load_editor("ft_m", settings).edit(model, tokenizer, [request])
    assert one.checksum() == two.checksum()
    assert FTConfig().objective == "target_tokens" and FTLConfig().objective == "last_token"
    for wrong in ({"append_eos": True}, {"norm_constraint": 0}, {"targets": "alone", "objective": "target_tokens"}):
        with pytest.raises(EditingError):
            load_editor("ft_l", wrong)
