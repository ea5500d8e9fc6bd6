"""Devices of an edit's tensors: updates beside the weights they change, bookkeeping on the CPU.

A computed edit has its updates where the model is, large ones on the CPU if a GPU has no room for them; a loaded one
has them on the CPU. A stream that was resumed from the store
has both, so they are brought together before tensors of several edits are combined, and before an update is formed
from its factors: a product rounds differently on another device, and resumed streams are bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.modeling.architectures import linear_of, unwrapped
from edit_hooks.modeling.memory import has_room

CPU = torch.device("cpu")


def placed(model: nn.Module, delta: Delta, updates: bool = True) -> Delta:
    """The edit as the history of a stream needs it; itself if no tensor has to move.

    Updates are on the devices of their weights (without ``updates``, where they were), the tensors of ``stream_state``
    and of the hook edit on the CPU.
    """
    if updates:
        delta = beside_weights(model, delta)
    if not _all_on_cpu(delta.stream_state):
        delta = replace(delta, stream_state=on_cpu(delta.stream_state))
    hook_edit = delta.hook_edit
    if hook_edit is not None and not _all_on_cpu(hook_edit.tensors):
        delta = replace(delta, hook_edit=HookEdit(hook_edit.kind, on_cpu(hook_edit.tensors), hook_edit.settings))
    return delta


def beside_weights(model: nn.Module, delta: Delta) -> Delta:
    """The edit with its factors and dense updates on the devices of their weights; itself if none has to move.

    Updates of parameters that the model does not have stay where they are: applying them raises.
    """
    inner = unwrapped(model)
    factors = {name: _moved(factor, _device(inner, f"{name}.weight")) for name, factor in delta.factors.items()}
    dense = {name: _to(update, _device(inner, name)) for name, update in delta.dense.items()}
    is_moved = any(factor is not delta.factors[name] for name, factor in factors.items())
    is_moved |= any(update is not delta.dense[name] for name, update in dense.items())
    return replace(delta, factors=factors, dense=dense) if is_moved else delta


def off_device(delta: Delta) -> Delta:
    """The edit with all saved tensors on the CPU; itself if none has to move."""
    tensors = saved_tensors(delta)
    if all(tensor.device == CPU for tensor in tensors):
        return delta
    # one round for all tensors: the copies from a GPU run together
    on_host = {id(tensor): copy for tensor, copy in zip(tensors, copied_to_host(tensors), strict=True)}

    def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: on_host[id(tensor)] for name, tensor in tensors.items()}

    factors = {
        name: factor._replace(left=on_host[id(factor.left)], right=on_host[id(factor.right)])
        for name, factor in delta.factors.items()
    }
    hook_edit = delta.hook_edit
    return replace(
        delta,
        factors=factors,
        dense=copies(delta.dense),
        masks=copies(delta.masks),
        stream_state=copies(delta.stream_state),
        hook_edit=hook_edit and HookEdit(hook_edit.kind, copies(hook_edit.tensors), hook_edit.settings),
    )


def saved_tensors(delta: Delta) -> list[torch.Tensor]:
    """All tensors that are saved with an edit."""
    tensors = [*delta.dense.values(), *delta.masks.values(), *delta.stream_state.values()]
    tensors += [side for factor in delta.factors.values() for side in (factor.left, factor.right)]
    return tensors if delta.hook_edit is None else [*tensors, *delta.hook_edit.tensors.values()]


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, on the CPU."""
    return dict(zip(tensors, copied_to_host(list(tensors.values())), strict=True))


def copied_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, themselves if they are there.

    Copies from a GPU go to page-locked memory, which its own engine writes at the rate of the bus, and are waited for
    together.
    """
    copies, devices = [], set()
    for tensor in tensors:
        if tensor.device.type == "cuda":
            copies.append(_page_locked(tensor).copy_(tensor, non_blocking=True))
            devices.add(tensor.device)
        else:
            copies.append(tensor.cpu())
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _page_locked(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor in page-locked memory; in ordinary memory, to which copies are slower, where that is short."""
    try:
        return torch.empty_like(like, device=CPU, pin_memory=True)
    except RuntimeError:
        return torch.empty_like(like, device=CPU)


def parked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New tensors where they may wait for their use: on their GPU while they take a small part of its free memory.

    Else on the CPU.
    """
    sizes: dict[torch.device, int] = {}
    for tensor in tensors.values():
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    stay = all(device.type == "cuda" and has_room(device, size) for device, size in sizes.items())
    return dict(tensors) if stay else on_cpu(tensors)


def _all_on_cpu(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(tensor.device == CPU for tensor in tensors.values())


def _device(model: nn.Module, parameter: str) -> torch.device | None:
    """Device of a parameter, inside an adapter layer or not; ``None`` if the model has no such parameter."""
    module, _, leaf = parameter.rpartition(".")
    try:
        tensor = getattr(linear_of(model.get_submodule(module)), leaf, None)
    except AttributeError:
        return None
    return tensor.device if isinstance(tensor, torch.Tensor) else None


def _moved(factor: Factor, device: torch.device | None) -> Factor:
    left, right = _to(factor.left, device), _to(factor.right, device)
    return factor if left is factor.left and right is factor.right else factor._replace(left=left, right=right)


def _to(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return tensor if device is None else tensor.to(device)  # itself if it is there
