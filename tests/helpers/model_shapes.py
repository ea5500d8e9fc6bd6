"""Shapes of published models, by which shipped configurations are selected."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# The shapes by which a model is recognized, from the models' own configurations.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "vocab_size": 50257},
    "gpt-j-6b": {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "vocab_size": 50400},
    "llama-2-7b": {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
    "llama-3-8b": {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256},
    "mistral-7b": {"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
    "qwen2.5-7b": {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064},
    "qwen3-8b": {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151936},
    "gemma-3-270m": {"model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640, "vocab_size": 262144},
}


def model_like(shape: dict[str, Any]) -> PreTrainedModel:
    """A model of this shape without weights."""
    return _outline(json.dumps(shape))


@functools.cache
def _outline(shape: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**json.loads(shape))
    if config.model_type == "gpt2":  # no file names the heads; their default number does not divide the width
        config.n_head = 20
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
