"""Tiny models quantized by bitsandbytes, and float copies with their dequantized weights."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, build_tokenizer, save_tiny
from edit_hooks.modeling.weights import is_quantized, keep_layout, read_weight

SCHEMES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def require_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="quantized models need the extra lm-eval-editing[quantized]")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # one line per 8-bit product


@functools.cache
def _folder(model_type, root):
    return save_tiny(root, model_type)


def quantized(root, model_type, scheme, **settings):
    """A tiny model quantized while it is loaded."""
    config = BitsAndBytesConfig(**SCHEMES[scheme], **settings)
    model = AutoModelForCausalLM.from_pretrained(
        _folder(model_type, root), quantization_config=config, dtype=torch.float32
    )
    keep_layout(model)
    return model.eval()


def dequantized(root, model_type, model):
    """The same model in float32, with the numbers its quantized weights stand for."""
    copy = AutoModelForCausalLM.from_pretrained(_folder(model_type, root), dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if is_quantized(module):
                target = copy.get_submodule(name)
                weight = read_weight(module)
                target.weight.copy_(weight.T if isinstance(target, Conv1D) else weight)
    return copy.eval()


def tokenizer_of(model_type):
    return build_tokenizer(NATURAL_TOKENIZER[model_type])
