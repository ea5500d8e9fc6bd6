"""Sizes of models and activations, free memory of their device, and matrices that stay there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

MEMINFO = Path("/proc/meminfo")  # of Linux
PARKED_SHARE = 8  # what waits on a GPU for its use takes at most an eighth of the free memory
DECOMPOSITION_COPIES = 5  # float64 matrices at once: the matrix, its eigenvectors or factor, and workspace
# Memory of recorded steps (:mod:`edit_hooks.modeling.device.recording`), which the allocator gives to nothing else.
graph_bytes: Counter[torch.device] = Counter()


def weight_bytes(model: nn.Module) -> int:
    """Size of the parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def bytes_per_token(model: Any) -> int:
    """Approximate size of the activations of all blocks that one token keeps for a backward pass."""
    config = model.config.get_text_config()
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    element = model.get_input_embeddings().weight.element_size()
    return config.num_hidden_layers * (16 * config.hidden_size + 4 * width) * element


def forward_bytes_per_token(model: Any) -> int:
    """Approximate size of what one token takes in a forward pass: its keys and values, and one block's activations."""
    return cache_bytes_per_token(model) + bytes_per_token(model) // model.config.get_text_config().num_hidden_layers


def cache_bytes_per_token(model: Any) -> int:
    """Approximate size of the keys and values of all blocks of one token; 131 kB for Llama 3 8B in 16 bits."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = model.get_input_embeddings().weight.element_size()
    return int(config.num_hidden_layers * 2 * num_heads * width * element)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or memory available to new processes; ``None`` where the system does not report it."""
    if device.type == "cuda":
        return free_cuda_bytes(device)
    available = re.search(r"MemAvailable:\s*(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(available[1]) * 1024 if available else None


def free_cuda_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what PyTorch's allocator holds of it and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - graph_bytes[device]
    return torch.cuda.mem_get_info(device)[0] + unused


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether tensors may wait on a GPU: what computes next finds most of the memory that is free now."""
    return num_bytes * PARKED_SHARE <= free_cuda_bytes(device)


class PlacedMatrix:
    """A matrix in main memory, and its copy on a GPU, which stays there if there is room.

    A second moment's factor has 1.6 GB on an 8B model, and every edit reads it.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix
        self._copy: torch.Tensor | None = None

    def like(self, other: torch.Tensor) -> torch.Tensor:
        """The matrix on the device and in the type of another tensor."""
        if self._copy is not None and (self._copy.device, self._copy.dtype) == (other.device, other.dtype):
            return self._copy
        self._copy = None  # first, so that both never take memory together
        copy = self.matrix.to(other)
        if copy.device.type == "cuda" and has_room(copy.device, copy.numel() * copy.element_size()):
            self._copy = copy
        return copy


def decomposition_device(matrix: torch.Tensor, device: torch.device | None) -> torch.device:
    """A GPU that has room to decompose a square matrix in float64; else the CPU."""
    num_bytes = DECOMPOSITION_COPIES * 8 * matrix.numel()
    if device is not None and device.type == "cuda" and free_cuda_bytes(device) > num_bytes:
        return device
    return torch.device("cpu")


def eigenvectors(matrix: torch.Tensor, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (ascending) and eigenvectors of a symmetric matrix, float64 on the CPU.

    Takes minutes for wide keys on a CPU.

    Args:
        device: where to compute if there is room; the CPU by default.
    """
    values, vectors = torch.linalg.eigh(matrix.to(decomposition_device(matrix, device)).double())
    return values.cpu(), vectors.cpu()
