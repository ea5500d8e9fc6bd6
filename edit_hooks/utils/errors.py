"""User-facing errors and "did you mean" hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EditingError(ValueError):
    """User error; the message names the input, the accepted values and a remedy."""


class UnusableRequestError(EditingError):
    """An edit request or a question that this model or editor cannot use, while it can use others.

    A run goes on without it: the case is unscored, with the message as the reason.
    """


def near_misses(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'rome'?"`` if a known word is similar, else ``""``.

    Args:
        cutoff: least similarity, from 0 to 1 (:func:`difflib.get_close_matches`).
    """
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(repr(word) for word in close)}?" if close else ""


def unknown_keys_error(what: str, unknown: Iterable[str], known: Iterable[str]) -> EditingError:
    """Create an error with every unknown key, its near misses and all accepted keys."""
    known = sorted(known)
    lines = [f"unknown {what} {key!r}.{near_misses(key, known)}" for key in sorted(unknown)]
    return EditingError("\n".join([*lines, f"Accepted: {', '.join(known)}."]))
