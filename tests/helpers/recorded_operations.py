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
        read: tensors that the steps of the last capture read and did not make, besides those of the model.
        unnamed: those among them that a recording was not given: their contents would be frozen, and on a GPU freed.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.num_captures = self.num_replays = 0
        self.error = error
        self.read: list[torch.Tensor] = []
        self.unnamed: list[torch.Tensor] = []

    def is_available(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def capture(self, model: nn.Module, step: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.num_captures += 1
        with _Operations() as operations:
            step()
        self.read = operations.read_besides([*model.parameters(), *model.buffers()])

        def replay() -> None:
            self.num_replays += 1
            operations.replay()

        return replay

    def check(self, recorded: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a recording, with a look at the tensors that it is given."""

        def checked(model: nn.Module, step: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Any:
            found = recorded(model, step, tensors, results)
            named = set(map(_place, tensors))
            self.unnamed += [tensor for tensor in self.read if _place(tensor) not in named]
            return found

        return checked


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

    def read_besides(self, known: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that operations read and none of them made; numbers of the host are constants of the code."""
        places, read = set(map(_place, known)), []
        for operation, args, kwargs, result in self.records:
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if operation is not torch.ops.aten.lift_fresh.default:
                read += [one for one in arguments if _place(one) not in places]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            places.update(map(_place, made + read))
        return read

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, result in self.records:
            again = operation(*args, **kwargs)
            for own, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.detach().copy_(new)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def recorded_on_a_cpu(error: Exception | None = None) -> Iterator[OperationRecorder]:
    """Scope in which steps run ahead and are recorded; recordings of earlier scopes are forgotten.

    AssertionError at its end if a recorded step read a tensor that its recording was not given.
    """
    recorder = OperationRecorder(error)
    with (
        ahead_on_a_cpu(),
        mock.patch.object(recording, "RECORDER", recorder),
        mock.patch.object(recording, "_recorded", recorder.check(recording._recorded)),
        mock.patch.object(recording, "_recordings", type(recording._recordings)()),
        mock.patch.object(recording, "_refused", type(recording._refused)()),
        mock.patch.object(recording, "_too_large", type(recording._too_large)()),
    ):
        yield recorder
    assert not recorder.unnamed, f"steps read {len(recorder.unnamed)} tensors that their recordings were not given"
