"""Tiny models with adapters of peft's kinds, and peft's own log-likelihoods under them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny

peft: Any = pytest.importorskip("peft", reason="adapters are peft's own")

FACTS = (("Port Elna is the capital of", " Dravonia"), ("Lake Odra lies in", " Peru"))

# Base model -> changes of the tiny llama. A padded vocabulary has more rows than the tokenizer has tokens.
BASES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "padded": {"tie_word_embeddings": True, "vocab_size": 528},
}


def _lora(**settings: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **settings)


def _other(config: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: config(task_type="CAUSAL_LM", **settings)


DOWN = {"target_modules": ["down_proj"]}
# Kinds whose layers add something to the output of a weight, or replace it; and kinds that scale or rotate it.
ADDITIVE: dict[str, Callable[[], Any]] = {
    "lora": _lora(**DOWN),
    "lora of the head": _lora(target_modules=["lm_head"]),
    "lora of the embedding": _lora(target_modules=["embed_tokens", "down_proj"]),
    "trained head": _lora(**DOWN, modules_to_save=["lm_head"]),
    "trained embedding": _lora(**DOWN, modules_to_save=["embed_tokens"]),
    "trained ends": _lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "trained map": _lora(target_modules=["q_proj"], modules_to_save=["down_proj"]),
    "trained tokens": _lora(**DOWN, trainable_token_indices=[5, 7]),
    "loha": _other(peft.LoHaConfig, r=2, init_weights=False, **DOWN),
    "vera": _other(peft.VeraConfig, r=4, init_weights=False, **DOWN),
    "norms": _other(peft.LNTuningConfig, target_modules=["post_attention_layernorm"]),
}
SCALING: dict[str, Callable[[], Any]] = {
    "dora": _lora(**DOWN, use_dora=True),
    "ia3": _other(peft.IA3Config, feedforward_modules=["down_proj"], init_ia3_weights=False, **DOWN),
    "oft": _other(peft.OFTConfig, r=4, oft_block_size=0, init_weights=False, **DOWN),
    "hra": _other(peft.HRAConfig, r=2, init_weights=False, **DOWN),
}
OUTSIDE: dict[str, Callable[[], Any]] = {
    "prompt": _other(peft.PromptTuningConfig, num_virtual_tokens=3),
    "prefix": _other(peft.PrefixTuningConfig, num_virtual_tokens=3),
}
KINDS = {**ADDITIVE, **SCALING, **OUTSIDE}


def save_base(folder: Path, base: str) -> str:
    """Save a base model with its tokenizer."""
    path = save_tiny(folder, "llama")
    build_model("llama", **BASES[base]).save_pretrained(path)
    return str(path)


def save_adapter(base_path: str, kind: str, folder: Path) -> str:
    """Save an adapter with random weights, as peft saves a trained one."""
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base_path), KINDS[kind]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return str(folder)


def load(base_path: str, adapter: str) -> Any:
    """The model as peft itself loads it."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_path), adapter).eval()


@torch.inference_mode()
def likelihoods(model: torch.nn.Module, base_path: str) -> list[float]:
    """Log-likelihoods of the facts' answers, by the model's own forward pass."""
    tokenizer, values = AutoTokenizer.from_pretrained(base_path), []
    for prompt, answer in FACTS:
        ids, start = tokenizer(prompt + answer).input_ids, len(tokenizer(prompt).input_ids)
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        values.append(sum(logprobs[number - 1, ids[number]].item() for number in range(start, len(ids))))
    return values


def facts_as_ids() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens of the facts' prompts and answers."""
    tokenizer = build_tokenizer("byte_bpe_bos")
    return [
        (tuple(tokenizer(prompt).input_ids), tuple(tokenizer(answer, add_special_tokens=False).input_ids))
        for prompt, answer in FACTS
    ]
