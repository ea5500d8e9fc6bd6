"""Tensor utilities: precision, norms, packed booleans, safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from edit_hooks.utils.files import replacing


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with text metadata, atomically.

    Its permissions are those of the umask.

    Raises:
        OSError: if the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors restricts its files to their owner
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=dict(header))
        except SafetensorError as error:  # also a full disk
            raise OSError(f"cannot write {path}: {error}") from error
        temporary.chmod(mode)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack a boolean tensor into bytes, eight entries each, in row-major order."""
    return torch.from_numpy(numpy.packbits(mask.cpu().numpy().reshape(-1)))


def unpack_bits(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Unpack :func:`pack_bits`, with the shape and device of ``like``."""
    bits = numpy.unpackbits(packed.cpu().numpy(), count=like.numel())
    return torch.from_numpy(bits).bool().view(like.shape).to(like.device)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per entry


def bit_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's entries read as integers: a quick check whether any of them has changed."""
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Promote half precision to float32.

    Losses, norms and updates are never computed in half precision.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
