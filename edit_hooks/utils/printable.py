"""Text of users, files and models made safe for a terminal: no control characters, bounded length."""

from __future__ import annotations

MAX_MESSAGE = 1000  # characters of an error message or a log line
_TAIL_SHARE = 3  # a third of a shortened text is its end, where messages have the remedy


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    r"""Escape characters that a terminal would interpret, and shorten long texts in the middle.

    Line feeds are kept; escape sequences, other control characters, direction marks and lone surrogates become
    ``\x1b``, ``\u202e`` and the like. Idempotent.

    Args:
        limit: maximum length of the result in characters.
    """
    text = _shorten(str(text), limit)
    if not text.isprintable():
        text = _shorten("".join(map(_escape, text)), limit)
    return text


def _escape(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    mark = f" [... {len(text)} characters ...] "
    room = max(limit - len(mark), 0)
    tail = room // _TAIL_SHARE
    return text[: room - tail] + mark + text[len(text) - tail :]
