"""Tiny models on disk, and their answers through the harness."""

from __future__ import annotations

from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM
from lm_runs import instance
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, build_model, build_tokenizer

PROMPTS = [("The capital of Ostravia is", " Velm"), ("He speaks", " English"), ("The trumpet player moved", " from")]
# float32: the adapter adds (x A) B, the edit in place multiplies with W + BA; only the order of sums differs.
TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-4}


def build(
    model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny model whose vocabulary is the tokenizer's: the harness resizes embeddings when it loads an adapter."""
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    return build_model(model_type, seed=seed, dtype=dtype, vocab_size=len(tokenizer)), tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Save model and tokenizer; returns the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def harness_answers(lm: HFLM) -> tuple[list[tuple[float, bool]], list[str]]:
    """Log-likelihoods and greedy continuations of the prompts."""
    scored = lm.loglikelihood([instance({}, prompt, target) for prompt, target in PROMPTS], disable_tqdm=True)
    settings = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    written = lm.generate_until(
        [instance({}, prompt, dict(settings), "generate_until") for prompt, _ in PROMPTS], disable_tqdm=True
    )
    return scored, written
