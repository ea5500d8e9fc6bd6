"""Pinned files: downloaded once, verified always, never guessed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from file_server import serve_files

from edit_hooks.utils import pinned_file
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.pinned_file import PinnedFile

CONTENT = b"first line\nsecond line\n"
FILE = PinnedFile(
    repository="someone/towns", commit="c" * 40, path="data/towns.json", sha256=hashlib.sha256(CONTENT).hexdigest()
)
SERVED = f"someone/towns/{'c' * 40}/data/towns.json"


@pytest.fixture(autouse=True)
def online_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_a_file_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serve_files({SERVED: CONTENT}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        path = FILE.fetch()
        assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path) and path.name == "towns.json"
        assert FILE.fetch() == path and server.requests[SERVED] == 1
        path.write_bytes(b"damaged")  # a damaged copy is replaced, not used
        assert FILE.fetch().read_bytes() == CONTENT and server.requests[SERVED] == 2


def test_another_content_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serve_files({SERVED: b"<html>sign in</html>"}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match="its sha256 differs"):
            FILE.fetch()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_missing_file_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_files({}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match=r"404.*put it at .*towns\.json"):
            FILE.fetch()


def test_offline_no_request_is_sent_and_a_copy_by_hand_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serve_files({SERVED: CONTENT}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match=r"HF_HUB_OFFLINE forbids.*put it at"):
            FILE.fetch()
        FILE.cached.parent.mkdir(parents=True)
        FILE.cached.write_bytes(CONTENT)
        assert FILE.fetch() == FILE.cached and not server.requests
