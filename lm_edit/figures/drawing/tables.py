"""Tables as data, written as Markdown or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edit_hooks.utils.printable import printable
from edit_hooks.utils.storage.files import write_atomically
from lm_edit.results.markdown import escape_cell

MAX_CELL = 200  # characters
FORMULA_STARTS = ("=", "+", "-", "@")  # a spreadsheet computes such cells


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; ``notes`` are sentences below it."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]
    notes: Sequence[str] = field(default_factory=tuple)


def write_table(table: Table, path: Path) -> Path:
    """Write a table as .md or .csv."""
    write_atomically(path, as_csv(table) if path.suffix == ".csv" else as_markdown(table))
    return path


def as_markdown(table: Table) -> str:
    """The table with its title and notes, all escaped; numbers are right-aligned."""
    is_number = [
        all(isinstance(row[column], (int, float)) for row in table.rows) for column in range(len(table.header))
    ]
    lines = [
        f"**{escape_cell(printable(table.title))}**",
        "",
        _line(table.header),
        "|" + "|".join("--:" if right else "---" for right in is_number) + "|",
        *map(_line, table.rows),
    ]
    if table.notes:
        lines += ["", *(escape_cell(printable(note)) for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """Header and rows; texts that a spreadsheet would compute get an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.header)
    for row in table.rows:
        writer.writerow(
            [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]
        )
    return text.getvalue()


def _line(cells: Sequence[str | int | float]) -> str:
    texts = (escape_cell(printable(" ".join(str(cell).split()), MAX_CELL)) for cell in cells)
    return "| " + " | ".join(texts) + " |"
