"""Pages of files in headless Chromium."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser; needs playwright."""
    from playwright import sync_api

    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visits:
    """Pages that a test opens.

    Attributes:
        pages: those that are open.
        problems: what a page has logged, raised or requested from elsewhere than files or its own server.
    """

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.pages: list[Any] = []
        self.problems: list[str] = []

    def open(self, path: Path | str, fragment: str = "", **options: Any) -> Any:
        """Open a file, or the address of a server; ``options`` are those of a browser context."""
        place = path if isinstance(path, str) else f"file://{path}"
        own = place if isinstance(path, str) else "file:"
        page = self.browser.new_context(**options).new_page()
        self.pages.append(page)
        page.set_default_timeout(8000)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(own) or self.problems.append(request.url))
        page.goto(f"{place}{fragment}")
        return page

    def close(self) -> None:
        """Close the pages; none may have had a problem."""
        for page in self.pages:
            page.context.close()
        assert self.problems == []


def open_viewer(page: Any, control: Any) -> Any:
    """Click what opens the viewer of cases, which are unpacked first; return the viewer."""
    control.click()
    viewer = page.locator("#viewer[open]")
    viewer.wait_for()
    return viewer
