"""Pretended accelerators: tensors that report another device and compute on the CPU.

Where tensors of two devices meet in an operation that an accelerator would refuse, RuntimeError is raised. So device
bugs show on a machine without an accelerator. The devices report themselves as CUDA devices; none is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from edit_hooks import Delta
from edit_hooks.deltas import placement
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.modeling.forward.kv_cache import CACHE

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
READS = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage)
FREE_MEMORY = (8 << 30, 16 << 30)  # bytes: free, in all


class Remote(torch.Tensor):
    """A tensor on a pretended device; ``local`` holds its numbers."""

    __module__ = "torch.pretended"  # for the code that tells plain weights from quantized ones
    local: torch.Tensor
    home: torch.device

    @staticmethod
    def __new__(cls, local: torch.Tensor, home: torch.device = DEVICE) -> Remote:
        layout = {"strides": local.stride(), "storage_offset": local.storage_offset(), "dtype": local.dtype}
        tensor: Remote = torch.Tensor._make_wrapper_subclass(cls, local.shape, dispatch_device=True, **layout)
        tensor.local, tensor.home = local, home
        return tensor

    def __init__(self, local: torch.Tensor, home: torch.device = DEVICE) -> None:
        """Everything is done in ``__new__``."""

    device = property(lambda self: self.home)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def __repr__(self) -> str:
        return f"Remote({self.local}, {self.home})"

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
    """What PyTorch decides before an operation is dispatched: tensors from Python numbers, reads, indices."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if function is torch.Tensor.tolist and isinstance(args[0], Remote):
            return args[0].cpu().tolist()
        if function in READS and isinstance(args[0], Remote):
            return function(args[0].local)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = tuple(torch.tensor(place) if isinstance(place, list) else place for place in places)
            args = (args[0], places, *args[2:])
        return function(*args, **kwargs)


def _run(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the CPU, with a result on the device where an accelerator would have it."""
    if operation is torch.ops.prim.device.default:
        return torch.device("meta", args[0].home.index)  # for PyTorch itself, which has no CUDA device here
    home = _result_device(operation, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    args, kwargs = tree_map(lambda leaf: leaf.local if isinstance(leaf, Remote) else leaf, (original := args, kwargs))
    result = operation(*args, **kwargs)
    if operation._schema.is_mutable and isinstance(result, torch.Tensor):
        return original[0]
    return result if home == CPU else tree_map(lambda leaf: _moved(leaf, home), result)


def _result_device(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Check the devices of an operation's tensors; the device of its result."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    homes = {_home(tensor) for tensor in tensors if isinstance(tensor, Remote) or tensor.dim()} or {CPU}
    first = _home(args[0]) if args and isinstance(args[0], torch.Tensor) else next(iter(homes))
    if operation in INDEXING:  # indices may be on the CPU, values that are written may not
        written = [one for one in args[2:] if isinstance(one, torch.Tensor) and one.dim()]
        homes = {first} | {_home(one) for one in tensors if _home(one) != CPU} | set(map(_home, written))
    if len(homes) > 1 and operation not in COPIES:
        found = sorted(map(str, homes))
        raise RuntimeError(f"{operation}: expected all tensors on the same device, but found {found}.")
    device = kwargs.get("device")
    if device is None:
        return first if operation in COPIES or operation in INDEXING else next(iter(homes))
    device = torch.device(device)
    return device if device.type == "cpu" else torch.device("cuda", device.index or 0)


def _home(tensor: torch.Tensor) -> torch.device:
    return tensor.home if isinstance(tensor, Remote) else CPU


def _moved(leaf: Any, home: torch.device) -> Any:
    return Remote(leaf, home) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """Scope in which tensors can be on pretended devices."""
    generator = torch.Generator
    with (
        # module.to() cannot put a Remote into an existing parameter
        mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True),
        mock.patch.object(torch, "Generator", lambda device=CPU: generator()),
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(torch.cuda, "mem_get_info", lambda _device=None: FREE_MEMORY),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", lambda _device=None: None),
        mock.patch.object(torch.cuda, "max_memory_allocated", lambda _device=None: 0),  # nothing is counted
        mock.patch.object(torch.cuda, "current_stream", lambda _device=None: mock.Mock()),
        mock.patch.object(placement, "_page_locked", lambda like: torch.empty(like.shape, dtype=like.dtype)),
        _Operations(),
        _Builders(),
    ):
        yield


def move_model(model: nn.Module, device: torch.device = DEVICE) -> None:
    """Move a model's parameters and buffers to a pretended device, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                numbers = parameter.local if isinstance(parameter, Remote) else parameter
                module._parameters[name] = nn.Parameter(Remote(numbers.detach(), device), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Remote(buffer.local if isinstance(buffer, Remote) else buffer, device)


def dispatch_model(model: Any, device_map: Mapping[str, int]) -> None:
    """Spread a model over pretended devices, with the hooks that accelerate's ``dispatch_model`` attaches.

    Args:
        device_map: number of the device per module; together they hold all parameters.
    """
    placed = {name: torch.device("cuda", number) for name, number in device_map.items()}
    for name, device in placed.items():
        move_model(model.get_submodule(name), device)
    model.tie_weights()
    for name, device in placed.items():
        for module in model.get_submodule(name).modules():
            if module is model.get_submodule(name) or next(module.parameters(recurse=False), None) is not None:
                _align(module, device, io_same_device=False)
    _align(model, DEVICE, io_same_device=True)  # returns the logits where the input was
    model.hf_device_map = dict(device_map)


def _align(module: nn.Module, device: torch.device, io_same_device: bool) -> None:
    hook = AlignDevicesHook(execution_device=device, io_same_device=io_same_device, skip_keys=CACHE)
    add_hook_to_module(module, hook, append=True)


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
