"""How fast a device computes: measured with short products, or stated for a device that is not here."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edit_hooks.base.footprint import Work

# An edit of Llama 3 8B launches 4,200 kernels in a step of 26 blocks, forward and backward (H100).
KERNELS_PER_PASS = 81
# Around each launch Python and autograd run; on that card 27 us per kernel where an empty launch took 9.
HOST_FACTOR = 3.0
BANDWIDTH, LAUNCH = 2e12, 9e-6  # bytes and seconds of a stated device, where launches were measured
MEASURED_SECONDS = 0.03
STREAMED = 2**26  # bytes of weights in a measurement


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        flops: floating point operations of matrix products of an edit's size.
        bandwidth: bytes that element-wise operations read and write.
        launch: seconds to start one operation.
    """

    flops: float
    bandwidth: float = BANDWIDTH
    launch: float = LAUNCH

    def seconds(self, work: Work) -> float:
        """The time of one edit alone: products, element-wise updates, and waiting for launches."""
        launches = work.block_passes * KERNELS_PER_PASS * self.launch * HOST_FACTOR
        return work.flops / self.flops + work.moved / self.bandwidth + launches


@torch.no_grad()
def measured_flops(device: torch.device, dtype: torch.dtype, rows: int, width: int, inner: int) -> float:
    """The rate of products [rows, width] x [width, inner] on a device."""
    x_NF = torch.ones(rows, width, device=device, dtype=dtype)
    # Different weights one after another, as the blocks of a model have them: a cache does not hold them all.
    count = max(1, STREAMED // (width * inner * x_NF.element_size()))
    weights = itertools.cycle(torch.ones(count, width, inner, device=device, dtype=dtype))
    return 2 * rows * width * inner / _seconds(lambda: x_NF @ next(weights), device)


@functools.cache
@torch.no_grad()
def measured_overheads(device: torch.device) -> tuple[float, float]:
    """Bandwidth of element-wise operations and the seconds to start one, as in :class:`Rates`."""
    large, small = torch.ones(2**22, device=device), torch.ones(8, device=device)
    moved = _seconds(lambda: large.mul_(1.0), device)
    return 2 * large.numel() * large.element_size() / moved, _seconds(lambda: small.mul_(1.0), device)


def _seconds(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of an operation that runs many times in a row."""
    operation()
    count, began = 0, _now(device)
    while (elapsed := _now(device) - began) < MEASURED_SECONDS or not count:
        for _ in range(4):
            operation()
        count += 4
    return elapsed / count


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
