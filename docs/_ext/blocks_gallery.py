"""The gallery: every figure with a thumbnail, its picture, and the commands that make it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from block import ROOT, Block

from lm_edit.figures.needs import DATA, FILE
from lm_edit.figures.registry import all_figures
from lm_edit.figures.spec import FigureSpec

PICTURES = ROOT / "docs/_static/figures"


def gallery(_: str) -> Block:
    """Thumbnails of all figures, and a section for each."""
    drawn: dict[str, str] = yaml.safe_load((PICTURES / "drawn.yaml").read_text(encoding="utf-8"))
    cards = "\n\n".join(_card(spec) for spec in all_figures())
    sections = [_section(spec, drawn) for spec in all_figures()]
    return Block("\n\n".join([f"::::{{grid}} 1 2 3 3\n:gutter: 2\n\n{cards}\n\n::::", *sections]))


def _card(spec: FigureSpec) -> str:
    picture = PICTURES / f"{spec.name}.svg"
    image = f":img-top: ../_static/figures/{spec.name}.svg\n:img-alt: {spec.title}\n" if picture.is_file() else ""
    return f":::{{grid-item-card}} [{spec.name}](#{spec.name})\n{image}\n{spec.title}\n:::"


def _section(spec: FigureSpec, drawn: dict[str, str]) -> str:
    title = f"{spec.title[0].upper()}{spec.title[1:]}."
    parts = [f"## {spec.name}", f"{title} Follows {spec.published}."]
    if (PICTURES / f"{spec.name}.svg").is_file():
        parts.append(f"![{spec.title}](docs/_static/figures/{spec.name}.svg)")
    elif (PICTURES / f"{spec.name}.md").is_file():
        parts.append((PICTURES / f"{spec.name}.md").read_text(encoding="utf-8").strip())
    parts.append(f"*Drawn from {drawn[spec.name]}.*" if spec.name in drawn else "*No example is drawn here.*")
    parts.append(f"```bash\n{_commands(spec)}\n```")
    if spec.needs.further:
        parts.append(f"Further runs: {spec.needs.further}.")
    return "\n\n".join(parts)


def _commands(spec: FigureSpec) -> str:
    suffix = "md" if spec.is_table else "svg"
    if spec.needs.reads == DATA:
        return f"lm-edit figure {spec.name} -o {spec.name}.{suffix}"
    written = re.search(r"--out (\S+)", spec.needs.command) if spec.needs.reads == FILE else None
    source = written[1] if written else "results"
    return f"{spec.needs.command}\nlm-edit figure {spec.name} {source} -o {spec.name}.{suffix}"


GALLERY_BLOCKS: dict[str, Callable[[str], Any]] = {"gallery": gallery}
