"""Types of JSON content, declared once and checked with the place of what differs.

A shape is a function of a value and of its place in the file; it returns what is wrong there, "" if nothing is.
The place of a part is made only once the part is wrong: a leaderboard checks a million parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from edit_hooks.utils.errors import EditingError

Shape: TypeAlias = Callable[[object, str], str]

# What content of another form than declared raises where it is used.
BROKEN = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError, RecursionError)
MAX_QUOTED = 200  # characters of an error of Python
MAX_SHOWN = 60  # characters of a value or a key in a message


def anything(value: object, where: str) -> str:
    """Any JSON value."""
    return ""


def _plain(words: str, accepts: Callable[[object], bool]) -> Shape:
    """A value without parts."""

    def check(value: object, where: str) -> str:
        return "" if accepts(value) else f"{where} is {_shown(value)}; {words} is needed"

    return check


TEXT = _plain("a text", lambda value: isinstance(value, str))
FLAG = _plain("true or false", lambda value: isinstance(value, bool))
NUMBER = _plain("a number", lambda value: type(value) in (int, float))
FINITE = _plain("a finite number", lambda value: isinstance(value, (int, float)) and _is_finite(value))
WHOLE = _plain("a whole number", lambda value: type(value) is int)
COUNT = _plain("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
SCALAR = _plain(
    "a number, a text, true, false or null", lambda value: value is None or isinstance(value, (int, float, str))
)


def _is_finite(value: float) -> bool:
    return not isinstance(value, bool) and math.isfinite(value)


def maybe(shape: Shape) -> Shape:
    """The shape, or null."""
    return lambda value, where: "" if value is None else shape(value, where)


def either(*shapes: Shape) -> Shape:
    """The first shape that fits; of a value that fits none, the message of the last one."""

    def check(value: object, where: str) -> str:
        problem = ""
        for shape in shapes:
            if not (problem := shape(value, where)):
                return ""
        return problem

    return check


def listed(shape: Shape) -> Shape:
    """A list whose entries have the shape."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, list):
            return f"{where} is {_shown(value)}; a list is needed"
        for number, entry in enumerate(value):
            if shape(entry, ""):
                return shape(entry, f"{where}[{number}]")
        return ""

    return check


def each(shape: Shape) -> Shape:
    """An object of any keys whose values have the shape."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, (dict, Mapping)):
            return f"{where or 'the content'} is {_shown(value)}; an object is needed"
        if shape is not anything:
            for key, entry in value.items():
                if shape(entry, ""):
                    return shape(entry, place(where, key))
        return ""

    return check


def fields(shapes: Mapping[str, Shape], required: tuple[str, ...] = ()) -> Shape:
    """An object with these fields; others may be anything, and those that are not required may be absent."""

    def check(value: object, where: str) -> str:
        if not isinstance(value, (dict, Mapping)):
            return f"{where or 'the content'} is {_shown(value)}; an object is needed"
        if missing := [name for name in required if name not in value]:
            return f"{place(where, missing[0])} is missing"
        for name, shape in shapes.items():
            if name in value and shape(value[name], ""):
                return shape(value[name], place(where, name))
        return ""

    return check


def place(where: str, key: str) -> str:
    """The place of a field, as in ``results.bake_es``."""
    name = key if key.isprintable() and len(key) <= MAX_SHOWN else repr(key[:MAX_SHOWN])
    return f"{where}.{name}" if where else name


def _shown(value: object) -> str:
    """A value in a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, Mapping)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@contextlib.contextmanager
def as_saved(otherwise: str) -> Iterator[None]:
    """Turn the errors of content of another form than in lm-eval's files into one with this beginning."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, EditingError):
            raise
        what = str(error)[:MAX_QUOTED]
        raise EditingError(f"{otherwise} ({type(error).__name__}: {what}).") from None
