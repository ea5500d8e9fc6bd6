"""Files: atomic writes, caches on bad disks, leftovers of killed processes, packaged data, digests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.scopes import undone

log = get_logger(__name__)


BLOCK_BYTES = 1 << 22


_TEMPORARY = re.compile(r"^\..+\.(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp$")


def without_folders(value: Any, keep: Collection[str] = ()) -> Any:
    """The value with the last part in place of every path that leads to a file or folder of this machine now.

    For files that are passed on. What such a path leads to has to be identified by other means, as by a digest.

    Args:
        value: a path, or a JSON-able value that may contain some.
        keep: keys of mappings whose values stay as they are: texts of people, which can look like a path.
    """
    if isinstance(value, Mapping):
        return {name: entry if name in keep else without_folders(entry, keep) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(entry, keep) for entry in value]
    if isinstance(value, (str, Path)) and os.sep in (text := str(value)):
        return Path(text).name if os.path.exists(os.path.expanduser(text)) else value
    return value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, for a file or a folder, and rename it at the end of the block.

    After an exception it is removed instead. A folder takes a name that is free, with all its files at once.
    The temporary name contains the machine and the process, so that :func:`remove_leftovers` can distinguish files of
    running and of killed processes.
    """
    temporary = _temporary_name(path)

    def clean_up() -> None:
        with contextlib.suppress(OSError):  # the error of the block matters, not that of the clean-up
            _remove(temporary)

    with undone(clean_up):
        yield temporary
        os.replace(temporary, path)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def remove_at_once(folder: Path) -> None:
    """Remove a folder so that it is never there with some of its files only."""
    temporary = _temporary_name(folder)
    os.replace(folder, temporary)
    _remove(temporary)


def _remove(path: Path) -> None:
    """Remove a file or a folder; a no-op if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_to_cache(path: Path, write: Callable[[], object], root: Path | None = None) -> None:
    """Call ``write``, which writes a cache's file at ``path``; log its OSErrors instead of raising them.

    The folder of ``path`` is created, and a folder in the file's place is renamed. A full or read-only disk costs the
    stored copy, not the run: each ``root`` and reason is logged once per process.

    Args:
        root: folder of the whole cache; by default that of ``path``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            log.warning("%s is a folder in the place of a file; it is renamed to %s.", path, set_aside(path).name)
        write()
    except OSError as error:
        _warn_unwritable(root or path.parent, error.strerror or str(error))


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    log.warning(
        "cannot write to %s: %s. The run continues, and results that cannot be stored there are computed again by the "
        "next run; free some space, or choose another folder.",
        folder,
        reason,
    )


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to the first free ``<name>.damaged-<n>``; return the new path."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    return aside


def remove_leftovers(root: Path) -> int:
    """Remove temporary files and folders of killed processes below ``root``.

    Those of other machines and of running processes are left alone.

    Returns:
        The number of files and folders removed.
    """
    removed = 0
    for path in list(root.rglob(".*.tmp")) if root.is_dir() else ():
        match = _TEMPORARY.search(path.name)
        if match and match["machine"] == _machine() and not _is_alive(int(match["pid"])):
            with contextlib.suppress(OSError):  # a read-only disk, or a file that another process removes
                _remove(path)
                removed += 1
    if removed:
        log.info("removed %d temporary files and folders of killed processes from %s.", removed, root)
    return removed


def is_temporary(path: Path) -> bool:
    """Whether the name of a file or folder is one that :func:`replacing` gives."""
    return _TEMPORARY.search(path.name) is not None


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine is running; always true on Windows."""
    if os.name != "posix":  # os.kill(pid, 0) ends the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's process
    return True


@functools.cache
def _machine() -> str:
    """Identify the scope of process ids: host name, boot and process namespace.

    Containers may share a host name.
    """
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def packaged_file(package: str, *parts: str) -> Path | None:
    """Find a file of an installed package without running its code, if it exists.

    Args:
        package: a top-level package; parents of other packages are imported.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location, *parts)
        if path.is_file():
            return path
    return None


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks of a few megabytes."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def path_digest(path: str | os.PathLike[str]) -> str | None:
    """Hexadecimal SHA-256 of a file, or of the names and contents of all files of a folder; ``None`` if missing."""
    root = Path(path).expanduser()
    if root.is_file():
        return sha256_of(root)
    if not root.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_of(file)}\0".encode())
    return digest.hexdigest()


def cache_root() -> Path:
    """Folder of all caches.

    It is ``$LM_EDIT_CACHE`` (``~`` is expanded), else ``lm-eval-editing`` in the user's cache folder.

    Raises:
        EditingError: no home directory, as in some containers.
    """
    chosen = os.environ.get("LM_EDIT_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm-eval-editing"
    except RuntimeError:
        owner = f"the user of LM_EDIT_CACHE={chosen}" if chosen else "this user (HOME is not set)"
        raise EditingError(
            f"the cache folder is unknown, because {owner} has no home directory. Set LM_EDIT_CACHE to a writable "
            "folder."
        ) from None


def parse_size(text: str) -> int:
    """Parse a number of bytes: ``5GB``, ``500 MB``, ``2GiB`` or a plain number.

    Raises:
        EditingError: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not match:
        raise EditingError(f"size {text!r} is not readable; write 5GB, 500MB, 2GiB or a number of bytes.")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def size_text(num_bytes: int) -> str:
    """A number of bytes for people, as :func:`parse_size` reads it: ``235MB``, ``1.5GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g}{name}"
    return f"{num_bytes}B"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it; its bytes are the same on all systems.

    Half surrogate pairs, which UTF-8 cannot hold, are written as escapes: foreign text must not cost the file.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}


def names_file(source: str) -> bool:
    """Whether a text names a file, not a benchmark: it has a suffix or a folder."""
    return Path(source).suffix != "" or len(Path(source).parts) > 1


def user_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path that a user gave; ``~`` is expanded.

    Raises:
        EditingError: for text that cannot be a path, and for a place that may not be looked at.
    """
    try:
        place = Path(path).expanduser()
        place.exists()
        if "\0" in str(place):
            raise ValueError("it contains a NUL byte")
    except (OSError, ValueError, RuntimeError, TypeError) as error:  # RuntimeError: ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise EditingError(f"the {what} {path!r} cannot be read: {reason}; give another path.") from None
    return place


def require_file(path: str | os.PathLike[str], what: str = "file") -> Path:
    """Check that a path names an existing regular file; ``~`` is expanded.

    Devices and pipes are refused: reading them may never end.

    Args:
        what: kind of file, for the message, as in ``file of edit requests``.

    Raises:
        EditingError: for a missing file, a folder, a pipe, a device, and a path that cannot exist.
    """
    file = user_path(path, what)
    if file.is_dir():
        raise EditingError(f"the {what} {path} cannot be read: it is a folder; name a file in it.")
    if not file.exists():
        raise EditingError(f"the {what} {path} cannot be read: there is no such file; check the path.")
    if not file.is_file():
        raise EditingError(
            f"the {what} {path} cannot be read: it is a pipe or a device; save its content to a file and name that."
        )
    return file


def read_text(path: str | os.PathLike[str], what: str = "file") -> str:
    """Read a UTF-8 text file of a user; a byte order mark is dropped.

    Args:
        what: kind of file, for messages.

    Raises:
        EditingError: as :func:`require_file`; and for files that cannot be opened, compressed files and bytes that are
            not UTF-8 text.
    """
    file = require_file(path, what)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise EditingError(f"the {what} {path} cannot be read: {error.strerror}.") from None
    for magic, kind in COMPRESSED.items():
        if content.startswith(magic):
            raise EditingError(f"the {what} {path} cannot be read: it is compressed ({kind}); unpack it first.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EditingError(
            f"the {what} {path} cannot be read: it is not UTF-8 text (byte {error.start}); convert it, as with "
            "iconv -t UTF-8."
        ) from None
    if "\0" in text:
        raise EditingError(f"the {what} {path} cannot be read: it holds NUL bytes, so it is no text; check the path.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def require_folder(path: str | os.PathLike[str], what: str) -> Path:
    """Check that a path is a folder or can become one; ``~`` is expanded and nothing is created.

    Args:
        what: purpose of the folder, for the message, as in ``store``.

    Raises:
        EditingError: if the path, or a part of it, is a file, or cannot exist.
    """
    folder = user_path(path, what)
    existing = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise EditingError(f"{what} {path}: {existing} is a file; name a folder.")
    return folder
