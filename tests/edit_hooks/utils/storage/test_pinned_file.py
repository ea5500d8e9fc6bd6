"""Published files: downloaded once, verified always, never guessed."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from file_server import FileServer, serve_files

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage import pinned_file
from edit_hooks.utils.storage.pinned_file import PinnedFile, UrlFile

CONTENT = b"first line\nsecond line\n"
FILE = PinnedFile(
    repository="someone/towns", commit="c" * 40, path="data/towns.json", sha256=hashlib.sha256(CONTENT).hexdigest()
)
SERVED = f"someone/towns/{'c' * 40}/data/towns.json"


@pytest.fixture(autouse=True)
def online_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)


def files_below(folder: Path) -> list[str]:
    """Names of the files; locks are empty and stay."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


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
    assert files_below(tmp_path) == []


def test_a_missing_file_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_files({}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match=r"404.*put it at .*towns\.json"):
            FILE.fetch()


def test_offline_no_request_is_sent_and_a_copy_by_hand_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with serve_files({SERVED: CONTENT}) as server:
        monkeypatch.setattr(pinned_file, "HOST", server.url)
        with pytest.raises(EditingError, match=r"HF_HUB_OFFLINE forbids.*put it at"):
            FILE.fetch()
        FILE.cached.parent.mkdir(parents=True)
        FILE.cached.write_bytes(CONTENT)
        assert FILE.fetch() == FILE.cached and not server.requests


# ------------------------------------------------------------------ plain addresses

DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_an_address_with_a_digest_is_downloaded_once_and_checked(tmp_path: Path) -> None:
    with serve_files({"dsets/towns.json": CONTENT}) as server:
        file = UrlFile(url=f"{server.url}/dsets/towns.json?download=true", sha256=DIGEST)
        server.files["dsets/towns.json?download=true"] = CONTENT
        assert file.fetch().read_bytes() == CONTENT and file.fetch().name == "towns.json"
        assert sum(server.requests.values()) == 1 and files_below(tmp_path) == ["towns.json"]
        wrong = UrlFile(url=f"{server.url}/dsets/towns.json", sha256="0" * 64)
        with pytest.raises(EditingError, match=r"its sha256 differs, so it is not the published file"):
            wrong.fetch()
    assert files_below(tmp_path) == ["towns.json"]


def test_without_a_digest_that_of_the_first_download_is_checked_from_then_on(tmp_path: Path) -> None:
    with serve_files({"towns.json": CONTENT}) as server:
        file = UrlFile(url=f"{server.url}/towns.json", sha256=None)
        path = file.fetch()
        assert file.record.read_text() == f"{DIGEST}\n" and file.fetch() == path and server.requests["towns.json"] == 1
        path.unlink()  # the record outlives the copy
        server.files["towns.json"] = b"another content"
        with pytest.raises(EditingError, match=rf"has changed since the first download; remove .*{file.record.name}"):
            file.fetch()
        assert not path.exists()
        file.record.unlink()
        assert file.fetch().read_bytes() == b"another content"
        path.write_bytes(b"damaged")
        assert file.fetch().read_bytes() == b"another content"


def test_a_copy_by_hand_of_a_file_without_digest_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    file = UrlFile(url="https://example.org/towns.json", sha256=None)
    with pytest.raises(EditingError, match=r"HF_HUB_OFFLINE forbids.*put it at .*towns\.json"):
        file.fetch()
    file.cached.parent.mkdir(parents=True)
    file.cached.write_bytes(CONTENT)
    assert file.fetch() == file.cached and file.record.read_text().strip() == DIGEST


@pytest.mark.parametrize(
    "url", ["http://example.org/a.json", "ftp://example.org/a.json", "file:///etc/passwd", "a.json"]
)
def test_only_https_addresses_are_accepted(url: str) -> None:
    with pytest.raises(EditingError, match="not an https address"):
        UrlFile(url=url, sha256=None)


def test_odd_declarations_are_refused() -> None:
    with pytest.raises(EditingError, match="names no file"):
        UrlFile(url="https://example.org/", sha256=None)
    with pytest.raises(EditingError, match="64 hexadecimal digits"):
        UrlFile(url="https://example.org/a.json", sha256="abc")


def test_a_redirection_is_followed() -> None:
    with serve_files({"moved.json": CONTENT}) as server:
        server.redirects["towns.json"] = f"{server.url}/moved.json"
        assert UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch().read_bytes() == CONTENT


def test_a_file_above_the_limit_and_a_cut_connection_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_files({"towns.json": CONTENT}) as server:
        file = UrlFile(url=f"{server.url}/towns.json", sha256=None)
        monkeypatch.setattr(pinned_file, "MAX_BYTES", len(CONTENT) - 1)
        with pytest.raises(EditingError, match=r"towns\.json has more than 22 bytes, the limit"):
            file.fetch()
        monkeypatch.setattr(pinned_file, "MAX_BYTES", len(CONTENT))
        server.announced["towns.json"] = len(CONTENT) + 5
        with pytest.raises(EditingError, match="cannot be downloaded: "):
            file.fetch()
        assert files_below(tmp_path) == []
        del server.announced["towns.json"]
        assert file.fetch().read_bytes() == CONTENT


# ------------------------------------------------------------------ downloads that break off


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve_files({"towns.json": CONTENT}) as running:
        yield running


def partial_of(file: UrlFile) -> Path:
    return file.cached.with_name(".towns.json.part")


@pytest.mark.parametrize("sha256", [DIGEST, None])
def test_a_download_resumes_where_it_broke_off(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha256: str | None
) -> None:
    """23 bytes in pieces of 4, 7 and the rest: requests from byte 0, 4 and 11."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)  # 10 MB; the begun one is read again
    server.cuts["towns.json"] = [4, 7]
    file = UrlFile(url=f"{server.url}/towns.json", sha256=sha256)
    assert file.fetch().read_bytes() == CONTENT
    assert server.starts == [0, 4, 11]
    assert files_below(tmp_path) == (["towns.json"] if sha256 else ["towns.json", "towns.json.sha256"])


def test_a_later_call_resumes_a_file_with_a_digest(server: FileServer, tmp_path: Path) -> None:
    server.failures["towns.json"] = [403]
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    file.cached.parent.mkdir(parents=True)
    partial_of(file).write_bytes(CONTENT[:5])
    with pytest.raises(EditingError, match=r"403.* 5 bytes are kept, and the next try resumes there"):
        file.fetch()
    assert partial_of(file).read_bytes() == CONTENT[:5] and not file.cached.exists()
    assert file.fetch().read_bytes() == CONTENT and server.starts == [5]
    assert files_below(tmp_path) == ["towns.json"]


def test_without_a_digest_a_later_call_starts_again(server: FileServer, tmp_path: Path) -> None:
    file = UrlFile(url=f"{server.url}/towns.json", sha256=None)
    file.cached.parent.mkdir(parents=True)
    partial_of(file).write_bytes(CONTENT[:5])
    assert file.fetch().read_bytes() == CONTENT and server.starts == [0]


@pytest.mark.parametrize("kept", [b"wrong bytes", CONTENT + b"more"])
def test_a_partial_file_of_another_content_is_replaced(server: FileServer, tmp_path: Path, kept: bytes) -> None:
    """The digest of the completed file differs, or the server refuses the range (416): from the start, once."""
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    file.cached.parent.mkdir(parents=True)
    partial_of(file).write_bytes(kept)
    assert file.fetch().read_bytes() == CONTENT and server.requests["towns.json"] == 2
    assert files_below(tmp_path) == ["towns.json"]


def test_a_server_without_ranges_sends_everything_again(server: FileServer) -> None:
    server.ranges, server.cuts["towns.json"] = False, [4]
    assert UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch().read_bytes() == CONTENT
    assert server.starts == [0, 0]


@pytest.mark.parametrize(("code", "requests"), [(429, 3), (404, 1), (403, 1)])
def test_only_temporary_failures_are_tried_again(server: FileServer, code: int, requests: int) -> None:
    server.failures["towns.json"] = [code, code]
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    if requests == 1:
        with pytest.raises(EditingError, match=f"cannot be downloaded: .*{code}"):
            file.fetch()
    else:
        assert file.fetch().read_bytes() == CONTENT
    assert server.requests["towns.json"] == requests


def test_a_full_disk_and_an_unreachable_address(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pinned_file._LimitedFile, "write", full)
        with pytest.raises(EditingError, match=r"cannot be kept in .*No space left on device\. Free some space"):
            UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch()
    with pytest.raises(EditingError, match=r"cannot be downloaded: ConnectError.* put it at"):
        UrlFile(url="http://127.0.0.1:9/towns.json", sha256=DIGEST).fetch()


def test_calls_at_once_download_once(server: FileServer) -> None:
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    with ThreadPoolExecutor(4) as threads:
        assert {path.read_bytes() for path in threads.map(lambda _: file.fetch(), range(4))} == {CONTENT}
    assert server.requests["towns.json"] == 1
