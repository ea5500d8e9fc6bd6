"""Adapter layers around edited maps: whether an update of the weight inside does what an editor computes.

Editors compute an update E of a linear map R^F -> R^D so that its output moves by E x. Inside an adapter layer that
holds if the layer's output is the output of the weight plus something else, as with LoRA. It is tested on the layer
itself; no kind of adapter is named.

Shapes: D and F output and width of a linear map.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from edit_hooks.modeling.architectures import linear_of, map_shape, weight_of
from edit_hooks.modeling.linear_maps import is_linear_map, is_quantized
from edit_hooks.modeling.weights import AddedMap, weight_norm
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.scopes import undone

# Of the change of an output. Quantized maps compute in 16 bits, whose rounding makes 0.01.
MAX_DEVIATION, MAX_DEVIATION_QUANTIZED = 1e-4, 0.05
REMEDY = (
    "Merge the adapter into the weights (merge_and_unload of peft), save the model and edit that, or edit modules "
    "outside of the adapter (layers=...)."
)

# Adapter layer -> the state of its adapter when it was tested, and whether its output was additive.
_additive: weakref.WeakKeyDictionary[nn.Module, tuple[object, bool]] = weakref.WeakKeyDictionary()


def has_adapter_layers(model: nn.Module) -> bool:
    """Whether any module of a model is inside an adapter layer."""
    return any(linear_of(module) is not module for module in model.modules())


def require_additive(module: nn.Module, name: str) -> None:
    """Refuse an adapter layer whose output is not the output of the weight inside plus something else.

    DoRA scales the rows of the updated weight again, IA3 the output, OFT rotates the input: an update of the weight
    acts otherwise there than it was computed, and than it acts beside the layer.

    Args:
        module: a linear map, inside an adapter layer or not.

    Raises:
        EditingError: it names the module and the remedy.
    """
    if not _is_wrapped(module):
        return
    state = _state_of_adapter(module)
    if _additive.get(module, (None, True))[0] != state:
        _additive[module] = state, _adds_to_output(module)
    if not _additive[module][1]:
        raise EditingError(
            f"{name} is inside an adapter layer ({type(module).__module__}) that scales or rotates what its weight "
            f"computes, as DoRA, IA3 and OFT do, so an update of the weight would not act as it was computed. {REMEDY}"
        )


def require_trainable(module: nn.Module, name: str) -> None:
    """Refuse an adapter layer through which no gradient reaches the weight inside.

    Raises:
        EditingError: it names the module and the remedy.
    """
    if not _is_wrapped(module):
        return
    weight = weight_of(module)
    needed_gradient = weight.requires_grad
    try:
        weight.requires_grad_(True)
        with torch.enable_grad():
            output = module.forward(torch.ones(1, 1, map_shape(module)[1], dtype=weight.dtype, device=weight.device))
        reaches = output.requires_grad and torch.autograd.grad(output.sum(), weight, allow_unused=True)[0] is not None
    finally:
        weight.requires_grad_(needed_gradient)
    if not reaches:
        raise EditingError(
            f"{name} is inside an adapter layer ({type(module).__module__}) that passes no gradient to its weight, "
            f"which this editor trains. {REMEDY}"
        )


def _is_wrapped(module: nn.Module) -> bool:
    linear = linear_of(module)
    return linear is not module and is_linear_map(linear) and not weight_of(module).is_meta


def _state_of_adapter(module: nn.Module) -> object:
    """What changes with the adapter, but not with an edit of the weight inside."""
    weight = weight_of(module)
    own = [
        (name, id(parameter), parameter._version)
        for name, parameter in module.named_parameters()
        if parameter is not weight
    ]
    return own, str(getattr(module, "active_adapters", None)), getattr(module, "disable_adapters", None)


@torch.no_grad()
def _adds_to_output(module: nn.Module) -> bool:
    """Whether an update E of the weight changes the output of the layer by E x, as the weight's own output.

    Tested on a copy in float64, so that a layer that changes a few of many directions is noticed; quantized codes have
    no such copy.
    """
    is_code = is_quantized(module)
    layer = module if is_code else copy.deepcopy(module).double()
    was_training = [(part, part.training) for part in module.modules()]
    dtype = torch.float32 if is_code else torch.float64
    linear, device = linear_of(layer), weight_of(layer).device
    generator = torch.Generator().manual_seed(0)
    widths = (*map_shape(linear), map_shape(linear)[1])
    left_D, right_F, other_F = (torch.randn(width, generator=generator).to(device, dtype) for width in widths)
    x_12F = torch.stack([right_F, other_F])[None]
    try:
        layer.eval()  # without dropout
        before, own_before = layer.forward(x_12F), linear(x_12F)
        with _changed(linear, left_D, right_F):
            after, own_after = layer.forward(x_12F), linear(x_12F)
    finally:
        for part, training in was_training:
            part.training = training
    change, own_change = after - before, own_after - own_before
    most = MAX_DEVIATION_QUANTIZED if is_code else MAX_DEVIATION
    return float((change - own_change).norm()) <= most * float(own_change.norm())


@contextlib.contextmanager
def _changed(linear: nn.Module, left_D: torch.Tensor, right_F: torch.Tensor) -> Iterator[None]:
    """Scope in which an update as large as the weight is in it, or beside a quantized one."""
    scale = weight_norm(linear) / float(left_D.norm() * right_F.norm())
    if is_quantized(linear):
        added = AddedMap(linear)
        added.add_low_rank(left_D[:, None] * scale, right_F[:, None])
        with undone(added.remove):
            added.attach()
            yield
        return
    update = torch.outer(left_D * scale, right_F)
    weight_of(linear).add_(update.T if isinstance(linear, Conv1D) else update)  # of the copy
    yield
