"""Markdown links that work in the repository and on the site.

A page links to files as they lie in the repository. On the site, a link to another page stays relative, a link to a
file that is copied into a page goes to that page, and any other link to the repository at the built commit.
Without a known address of the repository, the link becomes its text and the path.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
NOT_PAGES = ("docs/templates/", "docs/README.md", "docs/_")
COPY = re.compile(r"^<!-- generated: copy (\S+) -->$", flags=re.MULTILINE)
# A code span (left alone), or a link whose text may hold brackets.
SPAN_OR_LINK = re.compile(
    r"(?P<code>(?P<ticks>`+)[^`].*?(?P=ticks))|(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)"
)
FENCE = re.compile(r"^\s*(```+|~~~+)")


def repository() -> str:
    """Address of the repository's files at the built commit, from ``DOCS_REPOSITORY`` or a GitHub workflow; or ""."""
    if address := os.environ.get("DOCS_REPOSITORY"):
        return address.rstrip("/")
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_SHA")
    server, name, commit = (os.environ.get(key, "") for key in names)
    return f"{server}/{name}/blob/{commit}" if server and name and commit else ""


def is_page(path: str) -> bool:
    """Whether the file, relative to the repository, is a page of the site."""
    return path.startswith("docs/") and path.endswith((".md", ".ipynb")) and not path.startswith(NOT_PAGES)


@functools.cache
def copies() -> dict[str, str]:
    """Files outside ``docs/`` -> the page that holds a copy of them."""
    pages = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    found = [(name, COPY.findall(path.read_text(encoding="utf-8"))) for name, path in pages.items() if is_page(name)]
    return {"README.md": "docs/index.md"} | {copied: name for name, files in found for copied in files}


def rebase(text: str, source: str, page: str) -> str:
    """Return the text with its links rewritten for a page.

    Args:
        text: Markdown. Fenced blocks and code spans stay as they are.
        source: the file that the links are relative to, itself relative to the repository.
        page: the page that shows the text, relative to the repository.
    """
    chunks, fence = [""], ""  # text and fenced blocks in turn
    for line in text.splitlines(keepends=True):
        mark = match[1] if (match := FENCE.match(line)) else ""
        if mark and not fence and not line.strip().startswith(f"{mark}{{"):
            fence = mark
            chunks.append("")
        chunks[-1] += line
        if mark and fence and mark.startswith(fence) and chunks[-1] != line:
            fence = ""
            chunks.append("")
    texts = [SPAN_OR_LINK.sub(lambda found: _rewritten(found, source, page), chunk) for chunk in chunks[::2]]
    chunks[::2] = texts
    return "".join(chunks)


def _rewritten(found: re.Match[str], source: str, page: str) -> str:
    if found["code"] or re.match(r"[a-z]+:|#", found["target"]):
        return found[0]
    path, hash_sign, anchor = found["target"].partition("#")
    full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    full = copies().get(full, full)
    if (is_page(full) and (ROOT / full).is_file()) or full.startswith("docs/_"):
        return f"{found['text']}({posixpath.relpath(full, posixpath.dirname(page))}{hash_sign}{anchor})"
    if not (ROOT / full).exists():
        raise ValueError(f"{page} links to {found['target']}, which is no file of the repository")
    if address := repository():
        return f"{found['text']}({address}/{full}{hash_sign}{anchor})"
    words = found["text"][1:-1]
    return words if full in words else f"{words} (`{full}`)"


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite the links of every page when it is read."""

    def read(app: Sphinx, name: str, source: list[str]) -> None:
        path = f"docs/{Path(app.env.doc2path(name)).relative_to(app.srcdir).as_posix()}"
        if path.endswith(".md"):
            source[0] = rebase(source[0], path, path)

    app.connect("source-read", read, priority=600)  # after the blocks of `generated`, which hold rewritten links
    return {"parallel_read_safe": True}
