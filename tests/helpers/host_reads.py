"""What lets a GPU wait for the host: reads of its values, copies between devices, results of unknown size."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edit_hooks.modeling.device import run_ahead
from edit_hooks.modeling.device.run_ahead import LateRead

# Operations that return a number to the host, or a tensor whose size depends on values.
READS = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy_"}
FROM_THE_HOST = {"lift_fresh"}  # of torch.tensor and its kin


@contextlib.contextmanager
def ahead_on_a_cpu() -> Iterator[None]:
    """Scope in which loops run as on a device that runs ahead."""
    with mock.patch.object(run_ahead, "KINDS", {"cpu", *run_ahead.KINDS}):
        yield


class HostReads(TorchDispatchMode):
    """Notes every operation inside that waits for the host or lets it wait; late reads are allowed.

    Attributes:
        found: name of the operation and the line of this project that called it. num_operations: of all kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_operations = 0
        self.is_allowed = False
        self.patch = mock.patch.object(LateRead, "__init__", self._allowed(LateRead.__init__))

    def __enter__(self) -> HostReads:
        self.patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.stop()

    def _allowed(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.is_allowed = True
            function(*args)
            self.is_allowed = False

        return call

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.split("::")[1]
        self.num_operations += 1
        if not self.is_allowed and _waits(name, args, result):
            lines = [frame for frame in traceback.extract_stack() if "edit_hooks" in frame.filename]
            self.found.append(f"{name} at {lines[-1].filename}:{lines[-1].lineno}" if lines else name)
        return result


def _waits(name: str, args: tuple[Any, ...], result: Any) -> bool:
    if name in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in COPIES:
        source = args[1] if name == "copy_" else args[0]
        return bool(source.device != result.device)
    if name == "where":  # a number on the host is copied
        return any(isinstance(value, torch.Tensor) and value.device != args[0].device for value in args[1:])
    return name in READS or name in FROM_THE_HOST
