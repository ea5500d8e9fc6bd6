"""Files and folders that the options of a run name; their content decides its results.

A trained editor, a saved stream, a local model or a folder of data counts with the content of all its files. Sizes and
times of modification would not do: an edited model has the sizes of the original, and a copy has other times.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import cache_root, sha256_of
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.sqlite_cache import CacheTable, SQLiteCache

log = get_logger(__name__)

# Options of the model class that name no folder that is read, but a thing that a folder may be named after as well (a
# clone of the code of `rome`), or a folder that runs write to.
NO_FOLDERS = ("editor", "mode", "edits", "store", "cache_dir", "offload_folder")
SOURCES = ("mini", "hub")  # values of `data` that are no paths
# Files and folders in a named folder that nothing loads: hidden ones, and the states from which trainings resume, which
# may be deleted afterwards.
NOT_LOADED = (".", "checkpoint-", "resume.safetensors")

LARGE = 1 << 26  # bytes from which a digest is kept between commands
DIGESTS = CacheTable(name="digests", columns="key TEXT PRIMARY KEY, digest TEXT, checksum TEXT", value="digest")


class NamedFile(NamedTuple):
    """A file or folder that an option names.

    Attributes:
        place: the option, as ``metadata.judge``; those of the model class without ``model_args``.
        path: as named, with ``~`` expanded.
        files: the file itself, or the files of the folder in the order of their names.
        num_bytes: of all files.
    """

    place: str
    path: Path
    files: tuple[Path, ...]
    num_bytes: int

    @property
    def digest(self) -> str | None:
        """SHA-256 (hex) of a file, or over names and contents of the files of a folder; ``None`` if unreadable."""
        try:
            if self.files == (self.path,):
                return _digest_of(self.path)
            return key_of({file.relative_to(self.path).as_posix(): _digest_of(file) for file in self.files})
        except OSError:  # the run reports it
            return None

    def __str__(self) -> str:
        number = len(self.files)
        files = "" if self.files == (self.path,) else f"{number} file{'s' * (number > 1)}, "
        return f"{self.place}: {self.path} ({files}{self.num_bytes / 1e6:.1f} MB)"


def named_files(values: Mapping[str, Any]) -> list[NamedFile]:
    """The files and folders that texts inside nested values name, each with the digest's place."""
    return [
        named
        for place, text in _texts(values)
        if (named := _named(place.removeprefix("model_args."), text)) is not None
    ]


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Place and text of every text inside a value."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(part, f"{place}.{name}" if place else str(name))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _texts(part, f"{place}.{number}")
    elif isinstance(value, str) and value:
        yield place, value


def _named(place: str, text: str) -> NamedFile | None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, the home of an unknown user, a NUL byte
        path = Path(text).expanduser()
        if path.is_file():
            return NamedFile(place, path, (path,), path.stat().st_size)
        if path.is_dir() and _may_name_folder(place, text):
            files = tuple(sorted(_files_of(path)))
            return NamedFile(place, path, files, sum(file.stat().st_size for file in files)) if files else None
    return None


def _may_name_folder(option: str, text: str) -> bool:
    return option not in NO_FOLDERS and not (option == "data" and text in SOURCES)


def _files_of(folder: Path) -> Iterator[Path]:
    """Files of a folder and of those below it, without :data:`NOT_LOADED`."""
    for path in folder.iterdir():
        if path.name.startswith(NOT_LOADED):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _files_of(path)


def _digest_of(path: Path) -> str:
    state = path.stat()
    return _digest_of_version(path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@functools.lru_cache(maxsize=16384)
def _digest_of_version(path: Path, *version: int) -> str:
    """Digest of a file, read again once it changes: runs share files, and weights are large.

    Digests of large files are kept between commands. The time of a change of the inode belongs to the key: a copy may
    keep the size and the time of modification, as ``rsync -t`` does.
    """
    size = version[1]
    if size < LARGE:
        return sha256_of(path)
    key = key_of([os.fspath(path), *version])
    cache = SQLiteCache(cache_root() / "digests" / "digests.sqlite", DIGESTS)
    if (known := cache.read([key]).get(key)) is not None:
        return known
    log.warning("reading %s (%.1f GB), whose content is part of the runs; once, until it changes", path, size / 1e9)
    digest = sha256_of(path)
    cache.write({key: digest})
    return digest
