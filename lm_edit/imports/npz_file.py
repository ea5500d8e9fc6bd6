"""Second moments in the ``.npz`` files of ROME's release, which MEMIT, AlphaEdit, EasyEdit and UltraEdit share.

``mom2.mom2`` is the sum of k k^T over ``mom2.count`` tokens. Arrays of Python objects, the only ones that numpy
unpickles, are refused; other members of the archive are not read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from numpy.lib import format as npy

from edit_hooks.utils.errors import EditingError, first_line

SUM, COUNT = "mom2.mom2.npy", "mom2.count.npy"
MAX_HEADER = 10_000


class KeySum(NamedTuple):
    """E[k k^T] over a number of tokens, [f, f]."""

    mean_FF: torch.Tensor
    num_tokens: int


def read_key_sum(path: Path) -> KeySum:
    """The second moment of one layer.

    Raises:
        EditingError: for another file, other arrays, and a count that is no positive number.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if missing := [name for name in (SUM, COUNT) if name not in names]:
                has = ", ".join(names[:5]) or "nothing"
                raise EditingError(
                    f"{path} has no {' and no '.join(missing)}, as the statistics of ROME have; it has {has}."
                )
            total, count = (_array(archive, name, path) for name in (SUM, COUNT))
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise EditingError(f"{path} is no readable .npz file ({first_line(error)}).") from None
    if count.size != 1 or total.ndim != 2 or total.shape[0] != total.shape[1]:
        raise EditingError(f"{path}: the sum has shape {list(total.shape)}; one square matrix is needed.")
    number = float(count.reshape(()))
    if not number.is_integer() or number < 1:
        raise EditingError(f"{path}: the sum is over {number:g} tokens; a positive whole number is needed.")
    return KeySum(torch.from_numpy(total).float() / number, int(number))


def _array(archive: zipfile.ZipFile, name: str, path: Path) -> numpy.ndarray:
    """A numeric array of an archive, no larger than its header states."""
    member = archive.getinfo(name)
    with archive.open(member) as file:
        try:
            version = npy.read_magic(file)
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            shape, fortran, dtype = read(file, max_header_size=MAX_HEADER)
        except (ValueError, KeyError, SyntaxError, TypeError, UnicodeError) as error:
            raise EditingError(f"{path}: {name} is no numpy array ({first_line(error)}).") from None
        if dtype.hasobject or dtype.kind not in "fiu":
            raise EditingError(f"{path}: {name} holds {dtype}; floating-point or whole numbers are needed.")
        size = int(numpy.prod(shape, dtype=object)) * dtype.itemsize if shape else dtype.itemsize
        if size > member.file_size:
            raise EditingError(f"{path}: {name} has {member.file_size} bytes; its shape {list(shape)} needs more.")
        content = file.read(size)
    if len(content) != size:
        raise EditingError(f"{path}: {name} is cut short.")
    return numpy.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C").copy()
