"""A recorder without a GPU: operations are recorded as a CUDA graph does, with the tensors that they ran on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from host_reads import ahead_on_a_cpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edit_hooks.modeling.device import recording


class OperationRecorder:
    """A :class:`edit_hooks.modeling.device.recording.Recorder` for tensors on the CPU.

    A replay runs the same operations on the same storages, whatever the Python code behind them would do now.

    Attributes:
        num_captures, num_replays: so far. error: raised by captures, if any.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.num_captures = self.num_replays = 0
        self.error = error

    def is_available(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def capture(self, model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.num_captures += 1
        with _Operations() as operations:
            step()

        def replay() -> None:
            self.num_replays += 1
            operations.replay()

        return replay


class _Operations(TorchDispatchMode):
    """Records every operation, its arguments and its results; all tensors stay alive, so their storages do not move."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.records.append((operation, args, dict(kwargs or {}), result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, result in self.records:
            again = operation(*args, **kwargs)
            for own, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.detach().copy_(new)


@contextlib.contextmanager
def recorded_on_a_cpu(error: Exception | None = None) -> Iterator[OperationRecorder]:
    """Scope in which steps run ahead and are recorded; recordings of earlier scopes are forgotten."""
    recorder = OperationRecorder(error)
    with (
        ahead_on_a_cpu(),
        mock.patch.object(recording, "RECORDER", recorder),
        mock.patch.object(recording, "_recordings", type(recording._recordings)()),
        mock.patch.object(recording, "_refused", type(recording._refused)()),
    ):
        yield recorder
