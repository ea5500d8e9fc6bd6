"""Models of other families, in mode=none, against plain calls of transformers; and what a probe finds out.

OPT calls a part of its decoder, ModernBERT transforms the states before its head, mixtures of experts read router
logits, Mamba and RWKV have no keys and values, LFM2 has a state beside them.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, case, instance
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from value_problems import each_model, loaded

from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.forward import forward_pass
from edit_hooks.modeling.forward.forward_pass import ForwardPass, forward_pass_of

PROMPTS = ["The mother tongue of Elena is", "Lake", "They say that the parliament of Port Elna belongs to"]
TARGETS = [" Serbian", " Velm", " x"]
ENDLESS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    **ENDLESS,
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 64}
RECURRENT = {**ENDLESS, "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}

FAMILIES: dict[str, tuple[dict[str, Any], ForwardPass]] = {
    "opt": ({**LLAMA, **OPT}, ForwardPass("apart")),
    "mixtral": ({**LLAMA, "num_local_experts": 4}, ForwardPass("apart")),
    "qwen3_moe": ({**LLAMA, **EXPERTS}, ForwardPass("apart")),
    "modernbert-decoder": ({**LLAMA, "cls_token_id": 0, "sep_token_id": 0}, ForwardPass("apart")),
    "mamba": ({**RECURRENT, "state_size": 4}, ForwardPass("apart", decodes=False, shares=False)),
    "rwkv": (
        {**RECURRENT, "attention_hidden_size": 32, "context_length": 400},
        ForwardPass("apart", decodes=False, shares=False),
    ),
    "lfm2": ({**LLAMA, **CONVOLUTIONS}, ForwardPass("apart", decodes=False, shares=False)),
}


def model_of(model_type: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FAMILIES[model_type][0])).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


@torch.no_grad()
def plain_score(model: PreTrainedModel, context: list[int], target: list[int]) -> float:
    logprobs = model(input_ids=torch.tensor([[*context, *target]])).logits[0].double().log_softmax(1)
    return sum(float(logprobs[len(context) - 1 + i, token]) for i, token in enumerate(target))


@torch.no_grad()
def plain_text(model: PreTrainedModel, context: list[int], length: int) -> tuple[int, ...]:
    """Greedy tokens, each from a call on the whole text."""
    ids = list(context)
    for _ in range(length):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(context) :])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_likelihoods_and_texts_are_the_models_own(model_type: str, tmp_path: Path) -> None:
    model, tokenizer = model_of(model_type), build_tokenizer("byte_bpe")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = build(str(tmp_path), mode="none", editor_args=None)
    scored = lm.loglikelihood([instance(case(), *pair) for pair in zip(PROMPTS, TARGETS, strict=True)])
    settings = {"until": ["zzz"], "max_gen_toks": 6}
    texts = lm.generate_until([instance(case(), prompt, dict(settings), "generate_until") for prompt in PROMPTS])
    for prompt, target, answer, text in zip(PROMPTS, TARGETS, scored, texts, strict=True):
        context, continuation = (tokenizer(part)["input_ids"] for part in (prompt, target))
        assert answer.final.logprob == pytest.approx(plain_score(model, context, continuation), abs=1e-4)
        expected = plain_text(model, context, 6)
        assert text.final.token_ids == expected[: len(text.final.token_ids)]
        assert len(text.final.token_ids) == 6 or text.final.stop == "eos"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_probe_finds_the_fastest_right_way(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    model, expected = model_of(model_type), FAMILIES[model_type][1]
    with caplog.at_level(logging.WARNING, logger="lm_eval.edited_hf"):
        assert forward_pass_of(model) == expected == forward_pass_of(model)
    slower = [record for record in caplog.records if "runs slower" in record.getMessage()]
    assert len(slower) == (expected != ForwardPass("apart"))  # said once


@each_model
def test_supported_families_run_decoder_and_head_apart(model_type: str) -> None:
    assert forward_pass_of(loaded(model_type)[0]) == ForwardPass("apart")
    assert forward_pass_of(build_model(model_type, dtype=torch.bfloat16)) == ForwardPass("apart")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("rows", ForwardPass("apart", decodes=False, shares=False, pads=False)),
        ("head", ForwardPass("whole")),
        ("decoder", ForwardPass("narrowed")),
    ],
)
def test_what_no_family_does_is_right_too(monkeypatch: pytest.MonkeyPatch, fault: str, expected: ForwardPass) -> None:
    """States that depend on the batch's width, logits that do not come from the head alone, a decoder never called."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    own = (model.model if fault == "rows" else model).forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output, width = own(*args, **kwargs), kwargs["input_ids"].shape[1]
        if fault == "rows":
            output.last_hidden_state = output.last_hidden_state * (1 + width)
        else:
            output.logits = output.logits.flip(2) + output.logits.shape[1] * (output.logits.shape[1] != width)
            output.logits[..., 3] += 50 * (output.logits.shape[1] != width)
        return output

    if fault == "decoder":
        model.named = copy.deepcopy(model.model)
        monkeypatch.setattr(model, "base_model_prefix", "named")
    else:
        monkeypatch.setattr(model.model if fault == "rows" else model, "forward", changed)
    assert forward_pass_of(model) == expected
    contexts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    jobs = [(ScoreItem(tuple(context), (7, 8)), None) for context in contexts]
    for answer, context in zip(score(model, jobs, Limits(), lambda count: None), contexts, strict=True):
        ids = torch.tensor([[*context, 7]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].log_softmax(1)
        wanted = float(logprobs[-2, 7] + logprobs[-1, 8])
        assert answer.logprob == pytest.approx(wanted, abs=1e-3)
    texts = [(GenerateItem(tuple(context), (), 4, ignore_end=True), None) for context in contexts]
    for text, context in zip(generate(model, tokenizer, texts, Limits(), lambda count: None), contexts, strict=True):
        assert text.token_ids == plain_text(model, context, 4)


def test_a_model_of_nan_is_probed_again() -> None:
    """An edit may have broken it: nothing is learned from its logits."""
    model = model_of("opt")
    weight = model.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        forward_pass_of(model)
        assert model not in forward_pass._known
        weight.copy_(kept)
    assert forward_pass_of(model) == FAMILIES["opt"][1]
