"""Text of the site that the code knows.

A page holds a comment on a line of its own, ``<!-- generated: NAME ARGUMENT -->``. When the page is read, the Markdown
of the function NAME of :mod:`blocks` replaces it. The functions need no Sphinx: a test calls each one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from links import rebase

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"^<!-- generated: ([\w-]+)(?: (\S+))? -->$", flags=re.MULTILINE)
PAGES = ("start", "guides", "editors", "benchmarks", "results", "reference", "explain", "project")


def marks_of(path: Path) -> list[tuple[str, str]]:
    """Names and arguments of the generated blocks of a page."""
    return MARK.findall(path.read_text(encoding="utf-8"))


def filled(text: str, page: str) -> str:
    """The text of a page, relative to the repository, with its generated blocks."""
    from blocks import BLOCKS

    def block(found: re.Match[str]) -> str:
        name, argument = found.groups()
        if name not in BLOCKS:
            raise ValueError(f"{page} asks for the generated block {name!r}; known are: {', '.join(sorted(BLOCKS))}")
        made = BLOCKS[name](argument or "")
        return rebase(made.text, made.source, page)

    return MARK.sub(block, text)


def pages() -> Iterator[Path]:
    """Markdown pages with generated blocks."""
    for folder in PAGES:
        yield from (path for path in sorted((ROOT / "docs" / folder).rglob("*.md")) if marks_of(path))


def setup(app: Sphinx) -> dict[str, bool]:
    """Fill in the blocks when a page is read, and read a page again when a block of it changes."""

    def read(app: Sphinx, name: str, source: list[str]) -> None:
        if MARK.search(source[0]):
            source[0] = filled(source[0], f"docs/{name}.md")

    def outdated(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
        before: dict[str, str] = getattr(env, "generated_blocks", {})
        now = {}
        for path in pages():
            name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
            text = filled(path.read_text(encoding="utf-8"), f"docs/{name}.md")
            now[name] = hashlib.sha256(text.encode()).hexdigest()
        env.generated_blocks = now  # type: ignore[attr-defined]
        return [name for name, digest in now.items() if before.get(name, digest) != digest]

    app.connect("source-read", read, priority=400)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True}
