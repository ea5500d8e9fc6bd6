"""A generated block, and the Markdown that several blocks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
ValueT = TypeVar("ValueT")


class Block(NamedTuple):
    """Markdown, and the file that its links are relative to; by default the root of the repository."""

    text: str
    source: str = ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar in a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def unique(pairs: Iterable[tuple[str, ValueT]]) -> dict[str, ValueT]:
    """The pairs as a mapping; a name with two values, of which a table would show the last one, is a ValueError."""
    found: dict[str, ValueT] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} has several values, as of several tasks; a table by name alone shows one of them")
        found[name] = value
    return found


def definition(term: str, *paragraphs: str) -> str:
    """An entry of a definition list, which reads well on a phone where a table does not."""
    first, *rest = [text for text in paragraphs if text]
    return "\n\n".join([f"{term}\n: {first}", *(f"  {text}" for text in rest)])
