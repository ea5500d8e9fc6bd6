"""Files of public repositories: checked, cached, and explained when they cannot be had."""

from __future__ import annotations

import hashlib
import io
import urllib.request

import pytest

from edit_hooks import EditingError
from edit_hooks.utils.repository_files import RepositoryFile

CONTENT = b"phrases"


@pytest.fixture
def requested(monkeypatch, tmp_path):
    """Addresses that were asked for; each is answered with CONTENT."""
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    urls: list[str] = []

    def answer(url, timeout):
        urls.append(url)
        return io.BytesIO(CONTENT)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return urls


def pinned(content: bytes = CONTENT) -> RepositoryFile:
    return RepositoryFile("owner/name", "0" * 40, "folder/file.txt", hashlib.sha256(content).hexdigest())


def test_a_file_is_downloaded_once_and_kept(requested, tmp_path):
    file = pinned()
    path = file.fetch()
    assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path)
    assert pinned().fetch() == path
    assert requested == [f"https://raw.githubusercontent.com/owner/name/{'0' * 40}/folder/file.txt"]


def test_a_damaged_copy_is_downloaded_again(requested):
    path = pinned().fetch()
    path.write_bytes(b"phrased")
    assert pinned().fetch().read_bytes() == CONTENT
    assert len(requested) == 2


def test_other_content_is_refused_and_not_kept(requested):
    file = pinned(b"something else")
    with pytest.raises(EditingError, match="SHA-256"):
        file.fetch()
    assert not any(path.is_file() for path in file.cached_path.parent.iterdir())


def test_without_a_network_the_error_says_where_to_put_the_file(requested, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EditingError, match=r"HF_HUB_OFFLINE is set.*save it as .*file\.txt") as caught:
        pinned().fetch()
    assert "owner/name" in str(caught.value)
    assert not requested


def test_a_dead_network_is_an_editing_error(requested, monkeypatch):
    def fail(url, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(EditingError, match="no route to host"):
        pinned().fetch()
