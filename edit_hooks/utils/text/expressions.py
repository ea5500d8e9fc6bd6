"""Regular expressions of strangers' files: refused if they are malformed, or if a match could take for ever.

Python's engine tries every way to match, so ``(a+)+b`` takes 2^n steps on a text of n characters, and k repetitions in
a row take n^k. The steps are bounded by the structure of the expression, before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import shorten

MAX_LENGTH = 1000  # characters of an expression
MAX_STEPS, MAX_CHOICES = 1e9, 10_000  # steps over all texts; some ten seconds at most
REMEDY = "List the names of modules, or write a shorter expression."

# The parser behind `re`, whose module was renamed in Python 3.11.
_parser: Any = vars(re).get("_parser") or vars(re)["sre_parse"]
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class _Ways(NamedTuple):
    """The number of ways to match: at most ``choices`` times the length of the text to the power of ``repeats``."""

    repeats: int
    choices: int

    def in_a_text(self, length: int) -> float:
        return self.choices * float(length + 1) ** self.repeats / math.factorial(self.repeats)


def compiled(expression: str, what: str, texts: Iterable[str]) -> re.Pattern[str]:
    """Compile an expression that will be matched with these texts.

    Args:
        what: the setting, at the start of messages.

    Raises:
        EditingError: for a malformed expression, and for one whose match could take too many steps.
    """
    if len(expression) > MAX_LENGTH:
        raise EditingError(
            f"{what} has {len(expression)} characters; a regular expression of {MAX_LENGTH} is accepted."
        )
    try:
        pattern = re.compile(expression)
        ways = _ways(_parser.parse(expression), within=False)
    except (re.error, RecursionError, OverflowError) as error:
        raise EditingError(f"{what} is {shorten(expression)}, which is no regular expression ({error}).") from None
    except _UnboundedError as error:
        raise EditingError(
            f"{what} is {shorten(expression)}, whose match could take for ever: {error}. {REMEDY}"
        ) from None
    if ways.choices > MAX_CHOICES or sum(ways.in_a_text(len(text)) for text in texts) > MAX_STEPS:
        raise EditingError(
            f"{what} is {shorten(expression)}, whose match could take too long: it has {ways.repeats} repetitions and "
            f"{shorten(ways.choices)} choices. {REMEDY}"
        )
    return pattern


class _UnboundedError(Exception):
    """Part of an expression with an exponential number of ways to match."""


def _ways(parsed: Any, *, within: bool) -> _Ways:
    """The ways to match a parsed expression.

    Args:
        within: the expression is repeated as a whole.

    Raises:
        _UnboundedError: for repetitions and alternatives inside of a repetition, and for references to groups.
    """
    repeats, choices = 0, 1
    for operation, value in parsed:
        name = str(operation)
        if name.startswith("GROUPREF"):
            raise _UnboundedError("a reference to a group")
        if name in _REPEATS:
            parts, is_optional = [value[2]], (int(value[0]), int(value[1])) == (0, 1)
            is_repeat = not is_optional and (int(value[0]), int(value[1])) != (1, 1)
            own = _Ways(int(is_repeat), 2 if is_optional else 1)
        elif name == "BRANCH":
            parts, is_repeat = value[1], False
            own = _Ways(0, _alternatives(parts))
        else:
            parts, is_repeat, own = list(_bodies(value)), False, _Ways(0, 1)
        if within and own != _Ways(0, 1):
            raise _UnboundedError(f"{'alternatives' if name == 'BRANCH' else 'a repetition'} inside of a repetition")
        inner = [_ways(part, within=within or is_repeat) for part in parts]
        repeats += own.repeats + (max if name == "BRANCH" else sum)([one.repeats for one in inner] or [0])
        choices *= own.choices * math.prod(one.choices for one in inner)
    return _Ways(repeats, choices)


def _alternatives(parts: Iterable[Any]) -> int:
    """The number of alternatives that can match at one place: of literal texts, those that begin with one another."""
    literals = ["".join(map(chr, codes)) if codes is not None else None for codes in map(_literal, parts)]
    texts = [text for text in literals if text is not None]
    nested = max((sum(longer.startswith(text) for text in texts) for longer in texts), default=0)
    return max(1, nested + literals.count(None))


def _literal(parsed: Any) -> list[int] | None:
    """The characters of an expression without choices; ``None`` for another one."""
    items = list(parsed)
    return [value for _, value in items] if all(str(operation) == "LITERAL" for operation, _ in items) else None


def _bodies(value: Any) -> Iterator[Any]:
    """The parsed expressions inside of an operation."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _bodies(part)
