"""Linear maps in whatever layer they are: plain, transposed, quantized, inside an adapter.

A quantized map is known by what it does, not by its package: a module with the widths of a linear map that does not
compute with a stored weight of numbers. :mod:`edit_hooks.modeling.weights` tests it and reads its matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of buffers with two or more axes: codes. Models have one-dimensional or 64-bit integer buffers of their own.
CODE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)


def linear_of(module: nn.Module) -> nn.Module:
    """Strip adapter layers (peft's) from a linear map or an embedding: the module whose weight is in use.

    Of a module that the adapter replaces as a whole (``modules_to_save``) that is the adapter's copy.
    """
    own: Any = module
    while True:
        parts = own._modules
        if isinstance(parts.get("modules_to_save"), nn.ModuleDict) and "original_module" in parts:
            in_use = [] if own.disable_adapters else list(own.active_adapters)
            own = parts["modules_to_save"][in_use[0]] if in_use else parts["original_module"]
        elif (inner := parts.get("base_layer", parts.get("token_adapter"))) is not None:
            own = inner
        else:
            return own


def is_linear_map(module: nn.Module) -> bool:
    """Whether a module is a linear map, inside an adapter layer or not.

    By its class; the layers of some packages for quantized weights have the two widths alone.
    """
    linear = linear_of(module)
    return isinstance(linear, nn.Linear | Conv1D) or _has_widths(linear)


def _has_widths(linear: nn.Module) -> bool:
    if linear._modules or next(tensors(linear), None) is None:
        return False
    return all(isinstance(getattr(linear, name, None), int) for name in ("in_features", "out_features"))


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear map computes otherwise than with a stored weight of numbers.

    Its weight is a tensor of codes or of another package's class, there is none, or the forward pass is neither torch's
    nor that of the model's own code, which the self-check tests.
    """
    linear = linear_of(module)
    if not is_linear_map(linear):
        return False
    weight = linear._parameters.get("weight")
    return weight is None or not is_plain(weight) or not _has_plain_forward(linear)


def _has_plain_forward(linear: nn.Module) -> bool:
    cls = type(linear)
    if hasattr(linear, "quantization_scheme") and "forward" in vars(linear):
        return False  # compressed-tensors replaces the forward of the instance, which rounds the weight in each pass
    return cls.forward in PLAIN_FORWARDS or cls.__module__.startswith("transformers.models.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the weights themselves, not codes.

    Quantized weights can be subclasses of Tensor with a floating-point dtype. Those of torch itself are plain
    (distributed tensors).
    """
    return tensor.dtype in PLAIN_DTYPES and type(tensor).__module__.partition(".")[0] == "torch"


def tensors(linear: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of one module, those of its parts left out."""
    yield from linear.parameters(recurse=False)
    yield from linear.buffers(recurse=False)


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a linear map or an embedding, inside an adapter layer or not.

    For its device and dtype; :func:`edit_hooks.modeling.weights.read_weight` reads its numbers, also of quantized maps,
    for which an empty tensor stands in.
    """
    linear = linear_of(module)
    weight = linear._parameters.get("weight")
    if not is_quantized(linear):
        assert weight is not None
        return weight
    dtype = weight.dtype if weight is not None and weight.dtype in PLAIN_DTYPES else torch.float32
    return nn.Parameter(torch.empty(0, dtype=dtype, device=next(tensors(linear)).device), requires_grad=False)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as [in, out], as in GPT-2's Conv1D."""
    return isinstance(linear_of(module), Conv1D)


def map_shape(module: nn.Module) -> tuple[int, int]:
    """(output width d, input width f) of a linear map in either storage orientation, quantized or not."""
    linear: Any = linear_of(module)
    if isinstance(linear, nn.Linear) or _has_widths(linear):  # the weight of a quantized one may have another shape
        return linear.out_features, linear.in_features
    rows, columns = weight_of(module).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
