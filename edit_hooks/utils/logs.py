"""Loggers whose lines are safe to print."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

from edit_hooks.utils.printable import printable


class _Printable(logging.Filter):
    """Formats a record early, with control characters escaped and long values shortened."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        return True


_PRINTABLE = _Printable()
_warned: set[Hashable] = set()
_warning = threading.Lock()


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
