"""Locks between processes: of several that would do the same work, one does it and the others use its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import write_to_cache

log = get_logger(__name__)


@contextlib.contextmanager
def locked(path: Path, waiting: str | None = None, root: Path | None = None) -> Iterator[None]:
    """Hold the lock file at ``path``, waiting for other processes.

    The operating system releases the lock of a process that dies. Where no file can be written or locked, the block
    runs without a lock, with the warning of :func:`~edit_hooks.utils.storage.files.write_to_cache`.

    Args:
        waiting: logged if another process holds the lock.
        root: folder of the cache that it guards, for that warning.
    """
    from filelock import FileLock, Timeout  # slow to import and rarely needed

    lock = FileLock(path)

    def acquire() -> None:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is not None:
                log.warning("%s", waiting)
            lock.acquire()

    write_to_cache(path, acquire, root)
    try:
        yield
    finally:
        lock.release()
