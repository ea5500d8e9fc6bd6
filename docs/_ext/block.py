"""A generated block, and the Markdown that several blocks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Block(NamedTuple):
    """Markdown, and the file that its links are relative to; by default the root of the repository."""

    text: str
    source: str = ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def definition(term: str, *paragraphs: str) -> str:
    """An entry of a definition list, which reads well on a phone where a table does not."""
    first, *rest = [text for text in paragraphs if text]
    return "\n\n".join([f"{term}\n: {first}", *(f"  {text}" for text in rest)])
