"""Linear maps in whatever layer they are: plain, transposed, quantized, inside an adapter."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


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


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a linear map or an embedding, inside an adapter layer or not.

    For its device and dtype; :func:`edit_hooks.modeling.weights.read_weight` reads its numbers, also of quantized maps.
    """
    weight = linear_of(module).weight
    assert isinstance(weight, nn.Parameter)
    return weight


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as [in, out], as in GPT-2's Conv1D."""
    return isinstance(linear_of(module), Conv1D)


def map_shape(module: nn.Module) -> tuple[int, int]:
    """(output width d, input width f) of a linear map in either storage orientation, quantized or not."""
    linear = linear_of(module)
    if isinstance(linear, nn.Linear):  # the weight of a quantized one may be packed into another shape
        return linear.out_features, linear.in_features
    rows, columns = weight_of(module).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
