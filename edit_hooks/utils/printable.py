"""Text of users, files and models made safe for a terminal: no control characters, bounded length."""

from __future__ import annotations

import functools
import re

MAX_MESSAGE = 2000  # characters of an error message or a log line
_TAIL_SHARE = 3  # a third of a shortened text is its end, where messages have the remedy
# A quoted text in a message; an apostrophe inside of a word opens none.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")(?!\w)""")
_QUOTED_LENGTHS = (240, 120, 60, 30)  # characters of each, tried in this order
_MAX_SEARCHED = 50  # times the limit: longer texts are cut before quoted texts are looked for


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    r"""Escape characters that a terminal would interpret, and shorten long texts.

    A message is our words around quoted values of users and models. The quoted texts are shortened first, each in its
    middle, so that the words, which say what to do, are whole; if they are too long by themselves, their middle goes.
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
    searched = shorter = _cut(text, _MAX_SEARCHED * limit, len(text))
    for length in _QUOTED_LENGTHS:
        shorter = _QUOTED.sub(functools.partial(_cut_quoted, limit=length), searched)
        if len(shorter) <= limit:
            return shorter
    return _cut(shorter, limit, len(text))


def _cut_quoted(found: re.Match[str], limit: int) -> str:
    """A quoted text whose content has at most ``limit`` characters."""
    quoted = found.group()
    content = quoted[1:-1]
    if len(content) <= limit:
        return quoted
    mark = " [...] "
    tail = limit // _TAIL_SHARE
    return quoted[0] + content[: limit - tail - len(mark)] + mark + content[len(content) - tail :] + quoted[-1]


def _cut(text: str, limit: int, length: int) -> str:
    """A text without its middle; the mark names the ``length`` of the original."""
    if len(text) <= limit:
        return text
    mark = f" [... {length} characters ...] "
    room = max(limit - len(mark), 0)
    tail = room // _TAIL_SHARE
    return text[: room - tail] + mark + text[len(text) - tail :]
