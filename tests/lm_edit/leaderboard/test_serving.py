"""A page that cannot hold all cases: its files on the server of this machine, and in headless Chromium."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import document, frames

from edit_hooks import EditingError
from lm_edit.leaderboard.cases import Cases
from lm_edit.leaderboard.render_html import Page, render_html
from lm_edit.leaderboard.serving import serve
from lm_edit.leaderboard.table import build_board

NUMBER = 40


@pytest.fixture(scope="module")
def page() -> Page:
    """Of 40 cases of two editors, with room for a tenth of them."""
    scores = {editor: {"bake_es/efficacy_prob": [1.0, 0.0] * (NUMBER // 2)} for editor in ("rome", "memit")}
    results, cases = frames(scores)
    rows = results.to_dict("records")
    documents = [document(row, n, f"{row['editor']} answers {n}") for row in rows for n in range(NUMBER)]
    board = build_board(results, cases, resamples=99)
    whole = render_html(board, [], Cases(documents), "t").text
    made = render_html(board, [], Cases(documents), "t", len(whole.encode()) - 1)
    assert whole != made.text and len(made.parts) == 2
    return made


@pytest.fixture(scope="module")
def server(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text(page.text, encoding="utf-8")
    (folder / "secret.txt").write_text("not of the site")
    (folder / "cases").mkdir()
    for name, text in page.parts.items():
        (folder / name).write_text(text)
    started = serve(folder, 0)
    yield started
    started.shutdown()
    started.server_close()


def get(server: Any, path: str, host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    response = connection.getresponse()
    response.read()
    return response


def test_only_the_files_of_the_site_are_served_and_to_this_machine_alone(server, page):
    assert server.server_address[0] == "127.0.0.1"
    part = next(iter(page.parts))
    assert [get(server, path).status for path in ("/", "/index.html?x=1", f"/{part}")] == [200] * 3
    others = ("/secret.txt", "/cases/", "/cases/../secret.txt", "/../etc/passwd", "/%2e%2e/etc/passwd", f"/{part}x")
    assert [get(server, path).status for path in others] == [404] * len(others)
    # A site whose name resolves to this machine cannot read results through a browser.
    assert get(server, "/", host=f"evil.example:{server.server_port}").status == 403
    assert get(server, "/", host="evil.example").status == 403
    assert [get(server, "/", host=host).status for host in ("localhost:1", "127.0.0.1")] == [200, 200]
    with pytest.raises(EditingError, match=rf"--serve {server.server_port}: .*give another port"):
        serve(Path("."), server.server_port)


def test_a_connection_that_is_dropped_is_no_error(server):
    """A browser that reloads a large page closes it in the middle of the answer, which printed a traceback."""
    handler = server.RequestHandlerClass.__new__(server.RequestHandlerClass)
    handler.path, handler.headers, handler.request_version = "/", {"Host": "localhost"}, "HTTP/1.1"
    handler.requestline, handler.wfile = "GET /", mock.Mock(write=mock.Mock(side_effect=BrokenPipeError))
    handler.do_GET()
    assert handler.wfile.write.called


def test_every_case_is_reachable_where_the_page_is_served(server, page, tmp_path):
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    from chromium import CHROMIUM, Visits, chromium, open_viewer

    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with chromium() as browser:
        visits = Visits(browser)
        shown = visits.open(f"http://127.0.0.1:{server.server_port}/")
        assert "Opened as a file" not in shown.locator("#status").inner_text()
        viewer = open_viewer(shown, shown.locator("#compare"))
        assert f"{NUMBER} of {NUMBER} cases" in viewer.locator("#viewcount").inner_text()
        for number in range(NUMBER):
            assert viewer.locator(f'tr[data-doc="{number}"]', has_text=f"rome answers {number}").count() == 1
        assert viewer.locator("tr[data-doc]", has_text="memit answers").count() == NUMBER
        path = tmp_path / "index.html"
        path.write_text(page.text, encoding="utf-8")
        alone = visits.open(path)
        assert "Opened as a file, the page shows" in alone.locator("#status").inner_text()
        viewer = open_viewer(alone, alone.locator("#compare"))
        assert 0 < viewer.locator("tr[data-doc]").count() < NUMBER or "Opened as a file" in viewer.inner_text()
        visits.close()
