"""Loggers whose lines are safe to print."""

from __future__ import annotations

import logging

from edit_hooks.utils.printable import printable


class _Printable(logging.Filter):
    """Formats a record early, with control characters escaped and long values shortened."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        return True


_PRINTABLE = _Printable()


def get_logger(name: str) -> logging.Logger:
    """The logger of this name; its lines may quote data of users, files and models."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)  # a logger holds a filter once
    return logger
