"""Loggers whose lines are safe to print, and the warnings of a run for the end of its output."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Hashable, Iterator

from edit_hooks.utils.printable import printable

# Passed as `extra` with a line that describes a run and is a warning only so that every verbosity shows it.
BANNER = {"is_banner": True}


class _Printable(logging.Filter):
    """Formats a record early, with control characters escaped and long values shortened."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        if record.levelno < logging.WARNING or getattr(record, "is_banner", False):
            return True
        with _warning:
            for counts in _runs:
                counts[record.msg] = counts.get(record.msg, 0) + 1
            return not _runs or _runs[-1][record.msg] == 1


_PRINTABLE = _Printable()
_warned: set[Hashable] = set()
_runs: list[dict[str, int]] = []
_warning = threading.Lock()


@contextlib.contextmanager
def counted_warnings() -> Iterator[dict[str, int]]:
    """Scope of a run: warning -> how often it was given; the log has each once.

    Only lines of our own loggers count.
    """
    counts: dict[str, int] = {}
    with _warning:
        _runs.append(counts)
    try:
        yield counts
    finally:
        with _warning:
            _runs.remove(counts)


def get_logger(name: str) -> logging.Logger:
    """The logger of this name; its lines may quote data of users, files and models."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)  # a logger holds a filter once
    return logger


def warn_once(logger: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """Log a warning, unless this process has logged one of this key; safe to call from several threads."""
    with _warning:
        if key in _warned:
            return
        _warned.add(key)
    logger.warning(message, *args)
