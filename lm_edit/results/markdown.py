"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def markdown_table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table; the first row is the header. Characters that would end a cell are escaped."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
        if number == 0:
            yield "|---" * len(row) + "|"
