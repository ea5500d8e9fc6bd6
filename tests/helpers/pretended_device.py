"""A pretended accelerator: tensors that report another device and compute on the CPU.

Where tensors of both devices meet in an operation that an accelerator would refuse, RuntimeError is raised. So device
bugs show on a machine without an accelerator. The pretended device reports itself as ``meta``, the one device that
PyTorch has everywhere; a real meta tensor inside the scope is an error of this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from edit_hooks import Delta
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.hook_edit import HookEdit

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Remote(torch.Tensor):
    """A tensor on the pretended device; ``local`` holds its numbers."""

    __module__ = "torch.pretended"  # for the code that tells plain weights from quantized ones
    local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Remote:
        layout = {"strides": local.stride(), "storage_offset": local.storage_offset(), "dtype": local.dtype}
        tensor: Remote = torch.Tensor._make_wrapper_subclass(cls, local.shape, device=DEVICE, **layout)
        tensor.local = local
        return tensor

    def __repr__(self) -> str:
        return f"Remote({self.local})"

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Runs every operation on the CPU after a check of its devices."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


class _Builders(TorchFunctionMode):
    """Builds tensors from Python numbers on the CPU and moves them: PyTorch itself would make real meta tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if function is torch.Tensor.tolist and isinstance(args[0], Remote):
            return args[0].local.tolist()
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = tuple(torch.tensor(place) if isinstance(place, list) else place for place in places)
            args = (args[0], places, *args[2:])
        return function(*args, **kwargs)


def _run(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the CPU, with a result on the device where an accelerator would have it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    remote = [tensor for tensor in tensors if isinstance(tensor, Remote)]
    local = [tensor for tensor in tensors if not isinstance(tensor, Remote)]
    assert all(tensor.device == CPU for tensor in local), f"{operation} got a real meta tensor"
    if remote and operation not in COPIES:
        may_differ = operation in INDEXING and isinstance(args[0], Remote)  # indices may be on the CPU
        if not may_differ and any(tensor.dim() for tensor in local):
            raise RuntimeError(f"{operation}: expected all tensors on the same device, but found two devices.")
    device = kwargs.get("device")
    is_remote = bool(remote) if device is None else torch.device(device) == DEVICE
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, Remote) else leaf, (original := args, kwargs))
    result = operation(*args, **kwargs)
    if operation._schema.is_mutable and isinstance(result, torch.Tensor):
        return original[0]
    return tree_map(_remote, result) if is_remote else result


def _remote(leaf: Any) -> Any:
    return Remote(leaf) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """Scope in which tensors can be on the pretended device."""
    generator = torch.Generator
    with mock.patch.object(torch, "Generator", lambda device=CPU: generator()), _Operations(), _Builders():
        yield


def move_model(model: nn.Module) -> None:
    """Move a model's parameters and buffers to the pretended device, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Remote(parameter.detach()), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Remote(buffer)


def move_delta(delta: Delta, move: Callable[[torch.Tensor], torch.Tensor]) -> Delta:
    """An edit with every tensor moved by a function."""

    def moved(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: move(tensor) for name, tensor in tensors.items()}

    hook_edit = delta.hook_edit
    return dataclasses.replace(
        delta,
        factors={
            name: Factor(move(left), move(right), transposed)
            for name, (left, right, transposed) in delta.factors.items()
        },
        dense=moved(delta.dense),
        stream_state=moved(delta.stream_state),
        hook_edit=hook_edit and HookEdit(hook_edit.kind, moved(hook_edit.tensors), hook_edit.settings),
    )
