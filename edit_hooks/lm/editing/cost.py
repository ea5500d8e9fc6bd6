"""Seconds and GPU memory that edits take to compute."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from edit_hooks.edit_report import Cost

GIB = 2**30


@dataclass
class EditCost:
    """What a computation of one or several edits took; complete after the scope of :func:`measured`.

    Attributes:
        seconds: of all edits together.
        memory: the GPU memory; without a counter empty.
    """

    seconds: float = 0.0
    memory: Cost = field(default_factory=Cost)

    def of_one(self, num_edits: int = 1) -> Cost:
        """Seconds of one of ``num_edits`` edits, and the memory of all: they were computed together."""
        return replace(self.memory, seconds=round(self.seconds / num_edits, 4))


@dataclass(kw_only=True)
class KeptParts(abc.ABC):
    """Parts of a computation that a store keeps, and what those that are found took when they were computed.

    An edit costs the same whether its parts are found or not, so a table of times does not depend on the order of its
    rows, nor on interrupts.

    Attributes:
        memory: reads the peak of the GPU memory so far.
        seconds, peak_memory_gib: of the found parts.
    """

    memory: Callable[[], Cost] = Cost
    seconds: float = 0.0
    peak_memory_gib: float = 0.0

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[None]:
        """Scope in which editors keep parts, and find them."""

    def found(self, cost: Cost) -> None:
        """Count a part that is found."""
        self.seconds += cost.seconds or 0.0
        self.peak_memory_gib = max(self.peak_memory_gib, cost.peak_memory_gib or 0.0)

    def added_to(self, cost: Cost) -> Cost:
        """A cost with the memory of the found parts."""
        peak = cost.peak_memory_gib
        return cost if peak is None else replace(cost, peak_memory_gib=max(peak, self.peak_memory_gib))


@contextlib.contextmanager
def measured(model: nn.Module, *kept: KeptParts | None) -> Iterator[EditCost]:
    """Scope that computes edits of a model.

    Args:
        kept: keep parts of the computation inside the scope. What they have is not computed again, and costs what it
            did when it was.
    """
    cost, counter, parts = EditCost(), memory_counter(model), [one for one in kept if one is not None]
    if counter is not None:
        counter.start()
        for one in parts:
            one.memory = counter.read
    began = time.perf_counter()
    with contextlib.ExitStack() as scopes:
        for one in parts:
            scopes.enter_context(one.scope())
        yield cost
    cost.seconds = time.perf_counter() - began
    if counter is not None:
        cost.memory = counter.read()
    for one in parts:
        cost.seconds += one.seconds
        cost.memory = one.added_to(cost.memory)


def memory_counter(model: nn.Module) -> GPUMemory | None:
    """The counter for a model; ``None`` without weights on a GPU, since no other device has one."""
    counter = GPUMemory(model)
    return counter if counter.devices else None


class GPUMemory:
    """Peak of the memory that PyTorch has allocated on the GPUs of a model.

    It is that of the process: weights, edits, what is kept between them (statistics, originals of edited weights), and
    anything else that is there, such as a judge's model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the weights on GPUs, tied ones once."""
        sizes: dict[tuple[torch.device, int], int] = {}
        for tensor in _weights(model):
            if tensor.device.type == "cuda":
                place = tensor.device, tensor.data_ptr()
                sizes[place] = max(sizes.get(place, 0), tensor.numel() * tensor.element_size())
        self.devices = sorted({device for device, _ in sizes}, key=str)
        self.model_bytes = sum(sizes.values())

    def start(self) -> None:
        """Begin a new peak.

        PyTorch has one peak per device and process, and an earlier higher one, as of loading or answering, would hide
        that of the edits. No computation reads it, here or in PyTorch; a caller that does reads the peak since the last
        edits.
        """
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> Cost:
        """The peak since :meth:`start`, and the model's weights, which it contains; in GiB.

        Several devices: the sum of their peaks, which together they must have, if not all at the same moment.
        """
        peak_bytes = sum(torch.cuda.max_memory_allocated(device) for device in self.devices)
        if peak_bytes < self.model_bytes:  # nothing is counted (PYTORCH_NO_CUDA_MEMORY_CACHING)
            return Cost()
        return Cost(peak_memory_gib=round(peak_bytes / GIB, 6), model_memory_gib=round(self.model_bytes / GIB, 6))


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, all buffers, and what quantized modules add to the state dict."""
    yield from model.parameters()
    yield from model.buffers()
    yield from filter(torch.is_tensor, model.state_dict(keep_vars=True).values())
