"""Damage files byte by byte, and in the coarse ways of disks and hands."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def flipped(content: bytes, every: int = 1, dense: int = 0) -> Iterator[bytes]:
    """The content with one flipped bit: in each of the first ``dense`` bytes, then in one of ``every`` bytes.

    The bit changes from byte to byte, so that all eight occur.
    """
    positions = [*range(min(dense, len(content))), *range(dense, len(content), every)]
    for number, position in enumerate(positions):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (number % 8)
        yield bytes(damaged)


def flip_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)
    (path / "inside" / "file").write_text("?")


def remove(path: Path) -> None:
    path.unlink()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip": flip_in_the_middle,
    "truncate": truncate,
    "empty": empty,
    "folder": replace_by_a_folder,
    "remove": remove,
}


def restore(path: Path, content: bytes) -> None:
    """Write a file, also over a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(content)
