"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence


def markdown_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table with escaped cells; the first row is the header."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(map(escape_cell, row))} |"
        if number == 0:
            yield "|---" * len(row) + "|"


def escape_cell(text: str) -> str:
    """Escape what would end a cell, or start HTML, a link or code; names with underscores stay readable."""
    return re.sub(r"([\\|<>\[\]`])", r"\\\1", " ".join(text.split()))
