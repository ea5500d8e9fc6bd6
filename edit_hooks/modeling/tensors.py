"""Tensor utilities: precision, norms, packed booleans, safetensors files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import replacing, require_file
from edit_hooks.utils.storage.outputs import disk_errors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with text metadata, atomically.

    Equal content gives equal bytes. The permissions are those of the umask.

    Raises:
        OSError: if the file cannot be written.
    """
    with replacing(path) as temporary, disk_errors(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors restricts its files to their owner
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=dict(header))
        _sort_metadata(temporary)
        temporary.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Order the metadata entries of a safetensors file, which the library writes in a random order.

    The header, JSON after its length in eight bytes, keeps its length: a sorted one is as long, or padded as the format
    allows.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        if len(header.get("__metadata__", {})) < 2:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:  # else another way of escaping: valid as it is
            file.seek(8)
            file.write(text.ljust(length))


def require_tensors(path: str | os.PathLike[str], what: str) -> None:
    """Check that a file is a safetensors file, by its header alone.

    Raises:
        EditingError: as :func:`read_tensors`.
    """
    read_header(path, what)


def read_header(path: str | os.PathLike[str], what: str) -> dict[str, str]:
    """Read the text metadata of a safetensors file, and no tensor.

    Raises:
        EditingError: as :func:`read_tensors`.
    """
    with _opened(path, what, "cpu") as opened:
        return opened.metadata() or {}


def read_tensors(
    path: str | os.PathLike[str], what: str, device: str = "cpu"
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Read text metadata and all tensors of a safetensors file.

    Args:
        what: kind of file, for messages, as in ``saved edit``.

    Raises:
        EditingError: the file is missing, no regular file, or no safetensors file.
    """
    with _opened(path, what, device) as opened:
        header = opened.metadata() or {}
        return header, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], what: str, device: str) -> Iterator[safe_open]:
    file = require_file(path, what)
    try:
        with safe_open(file, framework="pt", device=device) as opened:
            yield opened
    except Exception as error:  # the format has errors of its own
        raise EditingError(f"the {what} {path} cannot be read: {first_line(error)}; is it complete?") from error


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


def in_widest_type(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the widest of their types, at least float32.

    A saved edit can act on a model of another precision than the one it was made on.
    """
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return [tensor.to(dtype) for tensor in tensors]
