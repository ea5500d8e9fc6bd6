"""Tiny models quantized by bitsandbytes, and float copies with their dequantized weights."""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, build_tokenizer, save_tiny
from edit_hooks.modeling.linear_maps import is_quantized
from edit_hooks.modeling.weights import keep_layout, read_weight

SCHEMES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def require_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="quantized models need the extra lm-eval-editing[quantized]")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # one line per 8-bit product


class CodedLinear(nn.Module):
    """Codes and a scale per row, as of HQQ and gptqmodel: two widths, no weight, no base class of torch's."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, (self.codes * self.scale).to(x.dtype), self.bias)


class OnlineLinear(nn.Linear):
    """As of BitNet: a floating-point weight that is quantized in the forward pass."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.sign() * 0.1, self.bias)


def _online(linear):
    linear.__class__ = OnlineLinear
    return linear


def _hqq(linear):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    return HQQLinear(linear, BaseQuantizeConfig(nbits=4, group_size=16), compute_dtype=torch.float32, device="cpu")


def _gptq(linear):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    size = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    packed = TorchLinear(bits=4, group_size=32, sym=True, desc_act=False, pack_dtype=torch.int32, **size)
    packed.qweight.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(0))
    packed.qzeros.fill_(0x77777777)  # the middle of 0 to 15, less one
    packed.scales.fill_(float(linear.weight.std()) / 4)
    packed.post_init()
    return packed


def _torchao(linear):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(linear, Int8WeightOnlyConfig())
    return linear


def _quanto(linear):
    from optimum.quanto import QLinear, qint8

    coded = QLinear.from_module(linear, weights=qint8)
    coded.freeze()
    return coded


# Scheme -> the module that must be there, and how a linear map becomes a layer of its package.
OTHERS = {
    "codes": (None, CodedLinear),
    "online": (None, _online),
    "hqq": ("hqq.core.quantize", _hqq),
    "gptq": ("gptqmodel.nn_modules.qlinear.torch", _gptq),
    "torchao": ("torchao.quantization", _torchao),
    "quanto": ("optimum.quanto", _quanto),
}


def replaced(model, change):
    """The model with layers of another package in place of the linear maps in its blocks."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, change(module))
    return model.requires_grad_(False)


@functools.cache
def _folder(model_type, root):
    return save_tiny(root, model_type)


def quantized(root, model_type, scheme, **settings):
    """A tiny model quantized while it is loaded, or with the layers of another package."""
    if scheme in OTHERS:
        package, change = OTHERS[scheme]
        if package is not None:
            pytest.importorskip(package, reason=f"the layers of {scheme} are not installed")
        model = AutoModelForCausalLM.from_pretrained(_folder(model_type, root), dtype=torch.float32)
        return replaced(model, change).eval()
    require_bitsandbytes()
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


# Settings for few steps, and editors that write into the prompt alone.
FAST = {"num_steps": 3, "context_templates": ["{}", "Then they said. {}"]}
ON_PROMPTS = ("ice", "ike", "ike_leaky_pool", "mello", "scr", "serac")


def editor_of(name):
    """An editor under its contract settings, with few steps."""
    cls = editor_class(name)
    settings = contract_settings(cls)
    target = settings.get("base_settings", settings)
    target.update({key: value for key, value in FAST.items() if key in target})
    return cls(settings)


@contextlib.contextmanager
def forbidden_forward(model):
    """A scope in which the model must not run."""

    def fail(*_args):
        raise AssertionError("the model ran before the refusal")

    handles = [module.register_forward_pre_hook(fail) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
