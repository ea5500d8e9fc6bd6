"""Devices that run ahead: a GPU computes what was launched while the host launches more.

Reading a value on the host (``item``, ``tolist``, a boolean index) lets the host wait until everything launched before
it is computed, and then the device until the host has launched something new. Loops on such a device keep their numbers
there and read copies one step late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TypeVar

import torch

from edit_hooks.utils.scopes import NestedStates

T = TypeVar("T")
KINDS = {"cuda"}  # of devices that run ahead


def runs_ahead(device: torch.device) -> bool:
    """Whether loops on a device should not read its values in every step."""
    return device.type in KINDS


# Whether fused attention may be that of cuDNN, which is a setting of the process.
_attention: NestedStates[ModuleType, bool] = NestedStates()


def without_attention_plans() -> contextlib.AbstractContextManager[None]:
    """Scope in which fused attention is not that of cuDNN.

    PyTorch prefers it in 16 bits on an H100 or B200, and it plans for every new shape: 0.4 s forward and 0.6 s backward
    on a B200 (modelscope/FunASR, issue 3704). Edits and questions are of new shapes all the time.
    """
    settings = torch.backends.cuda
    allow = settings.enable_cudnn_sdp
    return _attention.changed(settings, settings.cudnn_sdp_enabled(), lambda: allow(False), allow)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    if device.type == "cuda" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def launch_early(device: torch.device, launch: Callable[[], T]) -> Callable[[], T]:
    """Launch work before the host reads whether it is wanted, on a device that would wait for the host else.

    Returns:
        What the caller calls behind the read if the work is wanted: the launch itself on other devices.
    """
    if not runs_ahead(device):
        return launch
    result = launch()
    return lambda: result


class LateRead:
    """A copy of a tensor that is on its way to the host.

    Later changes of the tensor do not change it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not (tensor.is_cuda and torch.cuda.is_available()):
            self._copy = tensor.detach().to("cpu", copy=True)
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The copy, on the CPU; waits for the launches before it only."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class LateScalars:
    """Scalars that are read together, once a GPU has the step that follows them."""

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        first, *_ = parts.values()
        self.names = list(parts)
        self.values = LateRead(torch.stack([part.detach().to(first.device) for part in parts.values()]))

    def read(self) -> dict[str, float]:
        return dict(zip(self.names, self.values.wait().tolist(), strict=True))


class LateValues:
    """Scalars of one device that are appended one by one and read together."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values, self._unread = list(values), list[torch.Tensor]()

    def __len__(self) -> int:
        return len(self._values) + len(self._unread)

    def append(self, scalar: torch.Tensor) -> None:
        self._unread.append(scalar)

    def read(self) -> list[float]:
        """All values; the host waits for the last one."""
        if self._unread:
            self._values += torch.stack(self._unread).tolist()
            self._unread.clear()
        return self._values
