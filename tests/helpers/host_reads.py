"""What lets a GPU wait for the host: reads of its values, copies between devices, results of unknown size."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edit_hooks.modeling.device import run_ahead

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
RUN_AHEAD = run_ahead.__file__  # whose reads and copies the host does not wait for


@contextlib.contextmanager
def ahead_on_a_cpu() -> Iterator[None]:
    """Scope in which loops run as on a device that runs ahead."""
    with mock.patch.object(run_ahead, "KINDS", {"cpu", *run_ahead.KINDS}):
        yield


class HostReads(TorchDispatchMode):
    """Notes every operation inside that waits for the host or lets it wait; late reads and uploads are allowed.

    Attributes:
        found: name of the operation and the line of this project that called it. num_operations: of all kinds.
    """

    def __init__(self, *, of_cpu: bool = False) -> None:
        """With ``of_cpu`` tensors of the CPU stand for those of a device, too."""
        super().__init__()
        self.of_cpu, self.found, self.num_operations = of_cpu, list[str](), 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.split("::")[1]
        self.num_operations += 1
        if self._waits(name, args, result):
            lines = [frame for frame in traceback.extract_stack() if "edit_hooks" in frame.filename]
            if not lines or lines[-1].filename != RUN_AHEAD:
                self.found.append(f"{name} at {lines[-1].filename}:{lines[-1].lineno}" if lines else name)
        return result

    def _waits(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        tensors = [one for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
        if not self.of_cpu and all(one.device.type == "cpu" for one in tensors):
            return False
        if name in INDEXING:  # indices of the host are copied
            indices = [index for index in args[1] if index is not None]
            return any(index.dtype in (torch.bool, torch.uint8) or index.device != args[0].device for index in indices)
        if name in COPIES:
            source = args[1] if name == "copy_" else args[0]
            return bool(source.device != result.device)
        if name == "where":  # a number on the host is copied
            return any(isinstance(value, torch.Tensor) and value.device != args[0].device for value in args[1:])
        return name in READS or name == "lift_fresh"  # of torch.tensor, whose copy to a device is no other operation
