"""User-facing errors and "did you mean" hints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

from edit_hooks.utils.printable import printable

EXIT_CODE = 2  # of commands that end with a user error, as for mistakes in arguments
DEBUG_VARIABLE = "LM_EDIT_DEBUG"  # brings tracebacks of user errors back
MAX_QUOTED = 200  # characters of a name that hints and lists repeat
MAX_KEYS = 6  # unknown keys that one message names by themselves, and as many in a list


class EditingError(ValueError):
    """User error; the message names the input, the accepted values and a remedy.

    Messages quote data of users, so control characters are escaped and long messages shortened here, in the one place
    that all of them pass.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class NoUsableRequestError(EditingError):
    """All edits of a run are such that its editor cannot use them, so there is nothing to evaluate."""


class UnusableRequestError(EditingError):
    """An edit request or a question that this model or editor cannot use, while it can use others.

    The run continues without it: the case is unscored, with the message as the reason.

    Attributes:
        reasons: request key -> reason for the requests at fault, so that the others of a batch are computed together;
            empty where the caller knows the request.
    """

    def __init__(self, message: object = "", reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = {key: printable(reason) for key, reason in (reasons or {}).items()}


class ModelChangedError(RuntimeError):
    """An editor left the model changed, so nothing after it in this process can be trusted.

    It ends the run. After an :class:`EditingError` the edits of other cases are still made.
    """


def refuse(reasons: Mapping[str, str]) -> None:
    """Raise one UnusableRequestError for all requests with a reason (request key -> reason), if there are any."""
    if reasons:
        raise UnusableRequestError(next(iter(reasons.values())), reasons)


def traceback_wanted() -> bool:
    """Whether commands show tracebacks of user errors: ``LM_EDIT_DEBUG=1`` in the environment."""
    return os.environ.get(DEBUG_VARIABLE, "0").strip().lower() not in ("", "0", "false", "no", "off")


def near_misses(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'rome'?"`` if a known word is similar, else ``""``.

    Args:
        cutoff: least similarity, from 0 to 1 (:func:`difflib.get_close_matches`).
    """
    close = difflib.get_close_matches(str(name)[:MAX_QUOTED], [str(word) for word in known], n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(repr(word) for word in close)}?" if close else ""


def unknown_keys_error(
    what: str, unknown: Iterable[str], known: Iterable[str], others: str = "", hints: Iterable[str] = ()
) -> EditingError:
    """Create an error with every unknown key, its near misses and all accepted keys.

    Args:
        others: further keys that are accepted, in words, as in ``the options of --model hf``.
        hints: further keys that near misses are looked for in.
    """
    known = sorted(known)
    keys = sorted(str(key)[:MAX_QUOTED] for key in unknown)
    found = [(key, near_misses(key, dict.fromkeys([*known, *hints]))) for key in keys]
    found.sort(key=lambda pair: not pair[1])  # those with a hint first
    lines = [f"unknown {what} {key!r}.{hint}" for key, hint in found[:MAX_KEYS]]
    if more := [repr(key) for key, _ in found[MAX_KEYS:]]:
        listed = ", ".join(more[:MAX_KEYS]) + (", ..." if len(more) > MAX_KEYS else "")
        lines.append(f"and {len(more)} more: {listed}.")
    return EditingError("\n".join([*lines, f"Accepted: {', '.join(known)}{f', and {others}' if others else ''}."]))


def first_line(error: BaseException) -> str:
    """Type and first line of another library's error, for a message of our own.

    A line that ends in a colon announces the next one, which then follows.
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
