"""Checks of output paths before the work: writable, of the right kind, and no file of the inputs; full disks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import user_path


def check_output_file(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]] = (), overwrite: bool = False
) -> Path:
    """Check that a file can be written; return its path with ``~`` expanded.

    Args:
        inputs: files and folders that the command reads; other strings, such as hub ids, are ignored. An input is
            never overwritten, whichever path or link leads to it.
        overwrite: whether another existing file may be replaced.

    Raises:
        EditingError: for a folder, a device, an input, an existing file, and a folder that cannot be written.
    """
    file = user_path(path, "output")
    if file.is_dir() or str(path).endswith(os.sep):
        raise EditingError(f"the output {path} is a folder; name a file.")
    if os.path.lexists(file) and not file.is_file():
        raise EditingError(f"the output {path} is not a regular file; name a new file.")
    if file.is_file():
        for source in inputs:
            if _is_or_contains(expanded(source), file):
                raise EditingError(f"the output {path} is a file of the input {source}; name another file.")
        if not overwrite:
            raise EditingError(f"the output {path} exists; name another file, or replace it with --overwrite.")
    check_writable_folder(file.parent)
    return file


def check_output_folder(path: str | os.PathLike[str]) -> Path:
    """Check that a folder is new or empty and can be written; return its path with ``~`` expanded.

    Raises:
        EditingError: otherwise.
    """
    folder = check_writable_folder(path)
    if folder.is_dir() and any(folder.iterdir()):
        raise EditingError(f"{path} exists and is not empty; name a new folder.")
    return folder


def check_writable_folder(path: str | os.PathLike[str]) -> Path:
    """Check that files can be written in a folder, or that it can be made; return its path with ``~`` expanded.

    Raises:
        EditingError: otherwise.
    """
    folder = user_path(path, "output")
    if os.path.lexists(folder) and not folder.is_dir():
        raise EditingError(f"the output {path} is not a folder; name another folder.")
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions do not tell all: disks are read-only or full
            pass
    except OSError as error:
        raise EditingError(f"cannot write to the folder {existing} of the output: {error.strerror}.") from None
    return folder


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` expanded, also where the shell has not, as in ``--out=~/file``."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for unknown users


def _is_or_contains(source: Path, file: Path) -> bool:
    try:
        if source.is_dir():
            return any(os.path.samefile(inside, file) for inside in source.rglob("*") if inside.is_file())
        return source.is_file() and os.path.samefile(source, file)
    except (OSError, ValueError):  # a hub id, or a text that is no path
        return False


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError for a full disk and the like, which safetensors and tokenizers report as other exceptions."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or "(os error " not in str(error):  # as Rust spells the kernel's reason
            raise
        raise OSError(f"cannot write {path}: {error}") from error
