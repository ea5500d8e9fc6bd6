"""Files: written so that readers see a whole one or none, cleared away where a killed process left half-written ones,
found in installed packages without running their code, and hashed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from edit_hooks.utils.errors import EditingError

log = logging.getLogger(__name__)


BLOCK_BYTES = 1 << 22


_TEMPORARY = re.compile(r"\.(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp$")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, renamed to it when the block ends well and removed when it does not.

    The temporary name says which process writes it, so that :func:`remove_leftovers` can tell a living writer from one
    that was killed.
    """
    temporary = path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(root: Path) -> int:
    """Remove half-written files of dead processes of this machine below ``root``; returns how many there were.

    Files of other machines and of living processes are left alone.
    """
    removed = 0
    for path in root.rglob(".*.tmp") if root.is_dir() else ():
        found = _TEMPORARY.search(path.name)
        if found and found["machine"] == _machine() and not _is_alive(int(found["pid"])):
            path.unlink(missing_ok=True)
            removed += 1
    if removed:
        log.info("removed %d half-written files that a killed run left in %s.", removed, root)
    return removed


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; where that cannot be asked without harm (Windows), it is taken to."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process
    return True


@functools.cache
def _machine() -> str:
    """Where process ids mean something: host name, boot and process namespace (containers may share a host name)."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def packaged_file(package: str, *parts: str) -> Path | None:
    """Where a file of an installed package lies, or None; of a top-level package no code is run to find it."""
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
    """The content of a file, a few megabytes at a time."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def cache_root() -> Path:
    """Where this project keeps things: ``$LM_EDIT_CACHE``, else ``lm-eval-editing`` in the user's cache folder."""
    if chosen := os.environ.get("LM_EDIT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm-eval-editing"


def parse_size(text: str) -> int:
    """Bytes from ``5GB``, ``500 MB``, ``2GiB`` or a plain number.

    Raises:
        EditingError: for anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise EditingError(f"size {text!r} is not readable; write 5GB, 500MB, 2GiB or a number of bytes.")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def write_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
