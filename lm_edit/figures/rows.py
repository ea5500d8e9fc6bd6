"""Rows of results by the places of samples and matrices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

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
