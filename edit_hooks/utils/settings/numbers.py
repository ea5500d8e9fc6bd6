"""Ranges of numeric settings with one check for all of them, and numbers that JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edit_hooks.utils.errors import EditingError

LARGEST_WHOLE = 2**63 - 1  # of a 64-bit integer, which torch and numpy use


@dataclass(frozen=True)
class Range:
    """Accepted values of a number; NaN and infinity are never among them.

    Attributes:
        text: the accepted values in words, as in ``a positive number``.
        least, most: the bounds.
        above, below: the bound itself is not accepted.
    """

    text: str
    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, number: float) -> bool:
        if isinstance(number, int):
            if abs(number) > LARGEST_WHOLE:
                return False
        elif not math.isfinite(number):
            return False
        over = number > self.least if self.above else number >= self.least
        under = number < self.most if self.below else number <= self.most
        return over and under


FINITE = Range("a finite number")
POSITIVE = Range("a positive number", least=0, above=True)
NON_NEGATIVE = Range("zero or a positive number", least=0)
AT_LEAST_TWO = Range("at least 2", least=2)
ABOVE_ONE = Range("a number above 1", least=1, above=True)
SHARE = Range("a share from 0 to 1", least=0, most=1)
POSITIVE_SHARE = Range("a share above 0 and up to 1", least=0, most=1, above=True)
INNER_SHARE = Range("a share between 0 and 1", least=0, most=1, above=True, below=True)
SHARE_BELOW_ONE = Range("a share from 0 to below 1", least=0, most=1, below=True)
COSINE = Range("a cosine (-1 to 1)", least=-1, most=1)
SEED = Range("a whole number from 0 to 2^32 - 1", least=0, most=2**32 - 1)  # of every generator: numpy's are 32-bit


def require_number(what: str, value: object, within: Range = FINITE) -> float:
    """Check a number.

    Args:
        what: the setting, at the start of the message.

    Raises:
        EditingError: for other types (switches and texts among them) and numbers out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in within:
        raise EditingError(f"{what} is {shorten(value)}; {within.text} is needed.")
    return value


def require_whole(what: str, value: object, within: Range = POSITIVE) -> int:
    """Check a whole number; otherwise as :func:`require_number`."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in within:
        least = 1 if within is POSITIVE else 0
        text = f"a whole number >= {least}" if within in (POSITIVE, NON_NEGATIVE) else within.text
        raise EditingError(f"{what} is {shorten(value)}; {text} is needed.")
    return value


def require_numbers(what: str, value: object, within: Range = FINITE) -> None:
    """Check all numbers inside of a value: itself, or those of lists and mappings."""
    if isinstance(value, Mapping):
        for entry in value.values():
            require_numbers(what, entry, within)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            require_numbers(what, entry, within)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        require_number(what, value, within)


def shorten(value: object) -> str:
    """A value as Python spells it, at most 60 characters of it."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return "a whole number of more than 64 bits"  # Python refuses to spell numbers of thousands of digits
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


NOT_FINITE = ("nan", "inf", "-inf")  # texts of numbers that JSON lacks


def plain_numbers(value: Any) -> Any:
    """Replace NaN and infinities with texts, which ``float()`` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_numbers(entry) for entry in value]
    return value


def numbers_again(value: Any) -> Any:
    """Inverse of :func:`plain_numbers`."""
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    if isinstance(value, Mapping):
        return {key: numbers_again(entry) for key, entry in value.items()}
    return [numbers_again(entry) for entry in value] if isinstance(value, list) else value
