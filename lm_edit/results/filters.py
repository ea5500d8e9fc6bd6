"""Conditions on results, as ``--only`` of commands gives them, and values as the texts that are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from edit_hooks.utils.errors import EditingError


def filter_rows(results: pd.DataFrame, conditions: Sequence[str]) -> pd.DataFrame:
    """The rows that satisfy all conditions ``field=value`` (``--only``); conditions on one field are alternatives.

    Raises:
        EditingError: for conditions without ``=``, unknown fields, and when no row is left.
    """
    wanted: dict[str, set[str]] = {}
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals or name not in results.columns:
            raise EditingError(f"--only {condition!r}: FIELD=VALUE with one of {', '.join(results.columns)} is needed.")
        wanted.setdefault(name, set()).add(value)
    for name, values in wanted.items():
        texts = results[name].map(text_of)
        if not texts.isin(values).any():
            found = ", ".join(sorted(set(texts)))
            raise EditingError(f"--only {name}={'|'.join(sorted(values))} leaves no result; {name} is one of: {found}.")
        results = results[texts.isin(values)]
    return results


def is_missing(value: object) -> bool:
    """Whether a cell of a frame holds nothing: ``None`` or NaN."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def text_of(value: object) -> str:
    """A cell as text: nothing is empty, whole numbers have no decimal point."""
    if is_missing(value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
