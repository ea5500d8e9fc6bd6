"""Links of the site: rewritten for pages, checked in the built HTML."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_site import main
from links import rebase

PAGE = "docs/guides/own-facts.md"


@pytest.fixture
def no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCS_REPOSITORY", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (PAGE, "[settings](settings.md#lm-edit-tune)", "[settings](settings.md#lm-edit-tune)"),
        ("CONTRIBUTING.md", "[settings](docs/guides/settings.md)", "[settings](settings.md)"),
        (PAGE, "[recipe](../../CONTRIBUTING.md#style)", "[recipe](../project/contributing.md#style)"),
        (PAGE, "[cite\nus](../../CITATION.cff)", "cite\nus (`CITATION.cff`)"),
        (PAGE, "see `CITATION.cff`: [`CITATION.cff`](../../CITATION.cff)", "see `CITATION.cff`: `CITATION.cff`"),
        (PAGE, "`[a](b)` [lm](https://a.org/b.md) [here](#x)", "`[a](b)` [lm](https://a.org/b.md) [here](#x)"),
        (PAGE, "```\n[cite](../../CITATION.cff)\n```\n", "```\n[cite](../../CITATION.cff)\n```\n"),
        (PAGE, "````\n```\n[a](b)\n````\n[cite](../../CITATION.cff)", "````\n```\n[a](b)\n````\ncite (`CITATION.cff`)"),
    ],
)
@pytest.mark.usefixtures("no_repository")
def test_links_are_rewritten(source: str, text: str, expected: str) -> None:
    assert rebase(text, source, PAGE) == expected


def test_files_that_are_no_pages_are_linked_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCS_REPOSITORY", "https://example.org/files/abc/")
    assert rebase("[c](../../CITATION.cff)", PAGE, PAGE) == "[c](https://example.org/files/abc/CITATION.cff)"


@pytest.mark.parametrize("target", ["../nothing.yaml", "docs/guides/own-facts.md"])
def test_a_link_to_nothing_is_an_error(target: str) -> None:
    """A page that does not exist, too, as where a block links from another folder than its source."""
    with pytest.raises(ValueError, match=f"docs/guides/own-facts.md links to {target}"):
        rebase(f"[a]({target})", PAGE, PAGE)


def test_broken_links_anchors_and_images_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/index.html").write_text('<h1 id="top">B</h1><img src="../a.svg" alt="A figure">')
    (tmp_path / "a.svg").write_text("<svg/>")
    good = '<a href="b/index.html#top">b</a> <a href="b/">b</a> <a href="https://a.org/x">x</a> <p id="here"></p>'
    (tmp_path / "index.html").write_text(f'{good}<a href="#here">here</a>')
    assert main([str(tmp_path)]) == 0
    (tmp_path / "index.html").write_text(f'{good}<a href="c.html"></a><a href="b/#down"></a><img src="a.svg">')
    capsys.readouterr()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "index.html: the image a.svg has no text",
        "index.html: c.html does not exist",
        "index.html: b/#down has no such anchor",
    ]


def test_a_folder_without_a_site_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "build the site first" in capsys.readouterr().out
