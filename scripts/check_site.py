"""Check the built documentation site: every internal link and anchor exists, and every image has a text.

python scripts/check_site.py site
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What one page links to, what it can be linked at, and its images without a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.images_without_text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        if tag == "img" and not given.get("alt"):
            self.images_without_text.append(given.get("src", "?"))


def problems(site: Path) -> list[str]:
    """One line per broken link, missing anchor or image without a text; templates of the theme are skipped."""
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.relative_to(site).parts]
    pages = {path.resolve(): Page(path) for path in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: the image {source} has no text" for source in page.images_without_text]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{name}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} has no such anchor")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the problems; exit code 1 if there are some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder of the built site")
    site = parser.parse_args(arguments).site
    if not (site / "index.html").is_file():
        print(f"{site} has no index.html; build the site first: bash scripts/site.sh")
        return 2
    found = problems(site)
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, no broken link")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
