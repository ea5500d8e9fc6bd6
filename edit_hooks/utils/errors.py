"""Errors meant for the person at the keyboard, and the near-miss hint they carry."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EditingError(ValueError):
    """Something the user asked for cannot be done; the message says what came, what is accepted and what to try."""


def near_misses(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'rome'?"`` when ``name`` resembles a known word, else the empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(word) for word in close)}?" if close else ""


def unknown_keys_error(what: str, unknown: Iterable[str], known: Iterable[str]) -> EditingError:
    """An error that lists every unknown key of ``what`` with its near misses and all accepted keys."""
    known = sorted(known)
    lines = [f"unknown {what} {key!r}.{near_misses(key, known)}" for key in sorted(unknown)]
    return EditingError("\n".join([*lines, f"Accepted: {', '.join(known)}."]))
