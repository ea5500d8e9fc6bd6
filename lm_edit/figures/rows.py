"""Rows of results by their values: the choice of ``--only``, and the places of samples and matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError, near_misses

if TYPE_CHECKING:
    from pandas import DataFrame

SAMPLE_FILE = ("file", "task")  # columns that name the samples of a result
MATRIX = (*SAMPLE_FILE, "metric", "filter")  # columns that name the matrix of a result


def places_of(rows: DataFrame, columns: Sequence[str]) -> set[tuple[str, ...]]:
    """The values of the rows in some columns."""
    return set(zip(*(rows[column] for column in columns), strict=True))


def rows_at(rows: DataFrame, columns: Sequence[str], places: Collection[tuple[str, ...]]) -> DataFrame:
    """The rows that have one of the places in these columns."""
    from pandas import Series

    found = [place in places for place in zip(*(rows[column] for column in columns), strict=True)]
    return rows[Series(found, index=rows.index, dtype=bool)]


def keep_only(rows: DataFrame, only: Mapping[str, Sequence[str]]) -> DataFrame:
    """The rows with the given values.

    Args:
        only: column -> texts, of which each is a value of the column or, where no row has it, several between commas.

    Raises:
        EditingError: for unknown columns and where no row is left.
    """
    for column, values in only.items():
        if column not in rows.columns:
            raise EditingError(f"--only {column}: no such column.{near_misses(column, rows.columns)}")
        present = rows[column].map(_as_text)
        known = set(present)
        accepted = {value for text in values for value in ([text] if text in known else text.split(","))}
        kept = rows[present.isin(accepted)]
        if kept.empty:
            found = ", ".join(sorted(set(present))[:12])
            raise EditingError(f"--only {column}={','.join(values)}: no row has such a value; there are {found}.")
        rows = kept
    return rows


def _as_text(value: object) -> str:
    """A value as it is written in ``--only``; whole numbers without a point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
