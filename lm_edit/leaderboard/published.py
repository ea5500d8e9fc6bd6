"""Numbers printed in papers, for the columns of ours that measure the same or nearly the same.

They come with the package (``published.json``, written by ``scripts/published_values.py``), each with its paper, table
and column, and with how far its definition agrees with ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.json_io import read_json
from lm_edit.leaderboard.columns import Column

FILE = Path(__file__).with_name("published.json")


class PublishedValue(NamedTuple):
    """One printed number.

    Attributes:
        value: in the unit of our column.
        column: its heading in the paper.
        agreement: ``same`` definition, or ``near`` up to ``differs``.
        differs: what differs.
    """

    value: float
    column: str
    agreement: str
    differs: str


class PublishedRow(NamedTuple):
    """A row of a printed table.

    Attributes:
        source: paper and table.
        regime: single edits, a stream, or unedited.
        values: (task, metric) -> number.
    """

    source: str
    model: str
    editor: str
    regime: str
    values: dict[tuple[str, str], PublishedValue]


def published_rows(columns: Sequence[Column], choice: str = "matching") -> list[PublishedRow]:
    """The printed rows that have a number in one of the columns, with these numbers only.

    Args:
        choice: ``matching`` for columns on the published set of the printed number (``data=hub``, ``hub:multi``),
            ``all``, or ``none``. Numbers of another set or of the embedded samples are about other cases.
    """
    wanted = {
        (column.key.task, column.key.metric): column.identity["data"] for column in columns if not column.key.stage
    }
    if choice == "none" or not wanted:
        return []
    data = read_json(FILE, "table of published numbers")
    rows = []
    for row in data["rows"]:
        values = {
            (task, metric): PublishedValue(value, heading, agreement, data["differs"][note])
            for task, metric, value, heading, agreement, note, of_set in row["values"]
            if (task, metric) in wanted and (choice == "all" or wanted[task, metric] == of_set)
        }
        if values:
            rows.append(
                PublishedRow(
                    name_of_table(row["table"], data["papers"]), row["model"], row["editor"], row["regime"], values
                )
            )
    return sorted(rows, key=lambda row: (row.source, row.regime, row.model, row.editor))


def columns_named(names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Columns (task, metric) by what named them: ``TASK:METRIC``, or a printed table as ``wild_t3``.

    Raises:
        EditingError: for names of no such form, and of no table.
    """
    tables: dict[str, list[tuple[str, str]]] = {}
    for row in read_json(FILE, "table of published numbers")["rows"]:
        tables.setdefault(row["table"], []).extend((task, metric) for task, metric, *_ in row["values"])
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        task, colon, metric = name.partition(":")
        if not colon and name not in tables:
            raise EditingError(
                f"--columns {name}: give TASK:METRIC, or a printed table.{near_misses(name, tables)} Tables: "
                f"{', '.join(sorted(tables))}."
            )
        found[name] = [(task, metric)] if colon else list(dict.fromkeys(tables[name]))
    return found


def name_of_table(table: str, papers: dict[str, str]) -> str:
    """``bird_t3`` as ``BIRD table 3``, ``thinkedit_t5_t6`` as ``ThinkEdit tables 5 and 6``."""
    paper, *parts = table.split("_")
    numbers = [part[1:] for part in parts if re.fullmatch(r"t\d+", part)]
    if not numbers:
        return f"{papers[paper]} {parts[0]}"
    return f"{papers[paper]} table{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"
