"""Data parallelism: one whole model per process, results in document order.

``accelerate launch`` or ``torchrun`` starts the processes; lm-eval assigns the documents r, r + W, ... of every task to
rank r of W. Ranks do not communicate before results are gathered at the end, so a rank may have other kinds of requests
than the next, or no document at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)


def start_processes(tensor_parallel: bool) -> None:
    """Join the process group on CPU machines; elsewhere lm-eval does.

    Without ``cpu=True`` at the first use, ``accelerate`` treats a process that ``torchrun`` started on a CPU as a
    single one, and every process would do all the work.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerators = getattr(torch, "accelerator", torch.cuda)  # torch before 2.6 has no torch.accelerator
    if several and not tensor_parallel and not accelerators.is_available():
        from accelerate import Accelerator, InitProcessGroupKwargs

        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(weeks=52))])
    elif not several and os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ:
        log.warning(
            "accelerate launch --cpu ignores --num_processes and starts a single process (unless mpirun is used). "
            "Several processes on a CPU: torchrun --nproc_per_node 2 -m lm_eval ..."
        )


class DataParallelMixin:
    """Communication of lm-eval's model class for ranks that hold the whole model."""

    accelerator: Any
    _rank: int
    _world_size: int

    def join_processes(self) -> None:
        """Set rank and number of processes from accelerate.

        lm-eval's class does this for several GPUs of one machine only.
        """
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's numbers repeated for all ranks, without communication.

        lm-eval gathers counts of requests to pad all ranks to the same number of forward passes, which sharded models
        need. With equal counts it pads nothing.
        """
        if self._world_size <= 1:
            return tensor
        return torch.cat([tensor.reshape(-1)] * self._world_size)

    def barrier(self) -> None:
        """No-op: a rank without requests of some type would never reach the barrier."""

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Gather the results of all ranks at rank ``dst`` in document order.

        Raises:
            EditingError: if the ranks ended with different weights.
        """
        if self._world_size <= 1:
            return [obj]
        states = self._gathered(self.stream_state(), dst)
        gathered = self._gathered(obj, dst)
        if gathered is None or states is None:
            return None
        if len({state for state in states if state is not None}) > 1:
            raise EditingError(
                f"the {self._world_size} processes ended with different weights after the same stream of edits, so "
                "their answers must not be merged. Use a store in a folder that all of them can access "
                "(store=<folder>): one process then makes each step and the others load it."
            )
        return in_document_order(gathered)

    def _gathered(self, obj: Any, dst: int) -> list[Any] | None:
        gathered = [None] * self._world_size if self._rank == dst else None
        torch.distributed.gather_object(obj, gathered, dst=dst)
        return gathered

    def stream_state(self) -> str | None:
        """Fingerprint of a stream's final weights, equal on all ranks; else ``None``."""
        return None


def in_document_order(gathered: list[Any]) -> list[Any]:
    """Merge per-task results of all ranks into the first; the others become empty.

    Args:
        gathered: per rank ``{task: {metric: [one value per document]}}`` or ``{task: [samples]}``; rank r has the
            documents r, r + W, ... A rank without documents may lack metrics. Anything else is returned unchanged.
    """
    if not all(isinstance(results, Mapping) for results in gathered):
        return gathered
    merged: dict[str, Any] = {}
    for task in gathered[0]:
        parts = [results[task] for results in gathered]
        if all(isinstance(part, Mapping) for part in parts):
            names = dict.fromkeys(name for part in parts for name in part)
            merged[task] = {name: _interleaved([part.get(name, []) for part in parts]) for name in names}
        elif all(isinstance(part, list) for part in parts):
            merged[task] = _samples_in_order(parts)
        else:
            return gathered
    empty = {task: {name: [] for name in part} if isinstance(part, Mapping) else [] for task, part in merged.items()}
    return [merged, *(empty for _ in gathered[1:])]


def _interleaved(parts: list[list[Any]]) -> list[Any]:
    """Interleave per-rank values back into document order."""
    longest = max(map(len, parts))
    return [part[index] for index in range(longest) for part in parts if index < len(part)]


def _samples_in_order(parts: list[list[Any]]) -> list[Any]:
    """Merge samples by filter, then by document, as one process writes them."""
    filters = dict.fromkeys(sample["filter"] for part in parts for sample in part)
    return [
        sample
        for name in filters
        for sample in _interleaved([[sample for sample in part if sample["filter"] == name] for part in parts])
    ]
