"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

from edit_hooks.utils.files import replacing


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with text metadata: under a temporary name first, readable by whom the umask allows."""
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes files that only their owner can read
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=dict(header))
        temporary.chmod(mode)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """A boolean tensor as bits, eight to a byte, row by row."""
    return torch.from_numpy(numpy.packbits(mask.cpu().numpy().reshape(-1)))


def unpack_bits(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The boolean tensor of ``like``'s shape and device behind packed bits."""
    bits = numpy.unpackbits(packed.cpu().numpy(), count=like.numel())
    return torch.from_numpy(bits).bool().view(like.shape).to(like.device)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32: losses, norms and updates are never computed in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def weight_norm(module: nn.Module) -> float:
    """Frobenius norm of a linear map's weight, in at least float32."""
    return float(torch.linalg.vector_norm(module.weight.detach(), dtype=torch.float64))  # type: ignore[operator, union-attr]
