"""The gallery: every figure with a thumbnail, its picture, and the commands that make it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from block import Block
from made import example, examples

from lm_edit.figures.drawing.tables import Table, as_markdown
from lm_edit.figures.needs import DATA, FILE
from lm_edit.figures.registry import all_figures
from lm_edit.figures.spec import FigureSpec


def gallery(_: str) -> Block:
    """Thumbnails of all figures, and a section for each."""
    cards = "\n\n".join(_card(spec) for spec in all_figures())
    sections = [_section(spec) for spec in all_figures()]
    return Block("\n\n".join([f"::::{{grid}} 1 2 3 3\n:gutter: 2\n\n{cards}\n\n::::", *sections]))


def _card(spec: FigureSpec) -> str:
    has_picture = spec.name in examples() and not spec.is_table
    image = f":img-top: {_picture(spec)}\n:img-alt: {spec.title}\n" if has_picture else ""
    return f":::{{grid-item-card}} [{spec.name}](#{spec.name})\n{image}\n{spec.title}\n:::"


def _picture(spec: FigureSpec) -> str:
    kept = examples()[spec.name].picture
    return f"../_static/figures/{kept}" if kept else f"../_made/figures/{spec.name}.svg"


def _section(spec: FigureSpec) -> str:
    title = f"{spec.title[0].upper()}{spec.title[1:]}."
    parts = [f"## {spec.name}", f"{title} Follows {spec.published}."]
    if spec.name not in examples():
        parts.append("*No example is drawn here.*")
    else:
        parts.append(_example(spec))
        parts.append(f"*Drawn from {examples()[spec.name].runs}.*")
    parts.append(f"```bash\n{_commands(spec)}\n```")
    if spec.needs.further:
        parts.append(f"Further runs: {spec.needs.further}.")
    return "\n\n".join(parts)


def _example(spec: FigureSpec) -> str:
    if not spec.is_table:
        return f"```{{image}} {_picture(spec)}\n:alt: {spec.title}\n```"
    table = example(spec.name)
    assert isinstance(table, Table)
    return as_markdown(table).strip()


def _commands(spec: FigureSpec) -> str:
    suffix = "md" if spec.is_table else "svg"
    if spec.needs.reads == DATA:
        return f"lm-edit figure {spec.name} -o {spec.name}.{suffix}"
    written = re.search(r"--out (\S+)", spec.needs.command) if spec.needs.reads == FILE else None
    source = written[1] if written else "results"
    return f"{spec.needs.command}\nlm-edit figure {spec.name} {source} -o {spec.name}.{suffix}"


GALLERY_BLOCKS: dict[str, Callable[[str], Any]] = {"gallery": gallery}
