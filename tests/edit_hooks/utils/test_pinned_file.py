"""Published files: downloaded once, verified always, never guessed."""

from __future__ import annotations

import errno
import hashlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from file_server import FileServer, serve_files
from raw_server import drip, serve_raw

from edit_hooks.utils import pinned_file
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.pinned_file import PinnedFile, UrlFile

CONTENT = b"first line\nsecond line\n"
FILE = PinnedFile(
    repository="someone/towns", commit="c" * 40, path="data/towns.json", sha256=hashlib.sha256(CONTENT).hexdigest()
)
SERVED = f"someone/towns/{'c' * 40}/data/towns.json"


@pytest.fixture(autouse=True)
def online_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(pinned_file, "WAIT_SECONDS", 0.0)


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
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_a_redirection_away_from_https_is_refused(tmp_path: Path) -> None:
    with serve_files({}) as server:
        server.redirects["towns.json"] = "http://example.org/towns.json"
        with pytest.raises(EditingError, match=r"http://example\.org/towns\.json is not an https address"):
            UrlFile(url=f"{server.url}/towns.json", sha256=None).fetch()
        server.files["moved.json"] = CONTENT
        server.redirects["towns.json"] = f"{server.url}/moved.json"
        assert UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch().read_bytes() == CONTENT


def test_a_file_above_the_limit_and_a_cut_connection_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_files({"towns.json": CONTENT}) as server:
        file = UrlFile(url=f"{server.url}/towns.json", sha256=None)
        monkeypatch.setattr(pinned_file, "MAX_BYTES", len(CONTENT) - 1)
        with pytest.raises(EditingError, match="more than 22 bytes, the limit"):
            file.fetch()
        monkeypatch.setattr(pinned_file, "MAX_BYTES", len(CONTENT))
        server.announced["towns.json"] = len(CONTENT) + 5
        with pytest.raises(EditingError, match=r"cannot be downloaded: IncompleteRead"):
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
def test_a_download_resumes_where_it_broke_off(server: FileServer, tmp_path: Path, sha256: str | None) -> None:
    """23 bytes in pieces of 4, 7 and the rest: requests from byte 0, 4 and 11."""
    server.cuts["towns.json"] = [4, 7]
    file = UrlFile(url=f"{server.url}/towns.json", sha256=sha256)
    assert file.fetch().read_bytes() == CONTENT
    assert server.starts == [0, 4, 11]
    assert files_below(tmp_path) == (["towns.json"] if sha256 else ["towns.json", "towns.json.sha256"])


def test_a_later_call_resumes_a_file_with_a_digest(server: FileServer, tmp_path: Path) -> None:
    server.cuts["towns.json"] = [1, 1, 1, 1, 1]  # one byte per attempt
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    with pytest.raises(EditingError, match=r"IncompleteRead.* 5 bytes are kept, and the next try resumes there"):
        file.fetch()
    assert partial_of(file).read_bytes() == CONTENT[:5] and not file.cached.exists()
    assert file.fetch().read_bytes() == CONTENT and server.starts == [0, 1, 2, 3, 4, 5]
    assert files_below(tmp_path) == ["towns.json"]


def test_without_a_digest_a_later_call_starts_again(server: FileServer, tmp_path: Path) -> None:
    server.cuts["towns.json"] = [2] * 5
    file = UrlFile(url=f"{server.url}/towns.json", sha256=None)
    with pytest.raises(EditingError, match="IncompleteRead"):
        file.fetch()
    assert files_below(tmp_path) == []
    assert file.fetch().read_bytes() == CONTENT and server.starts[-1] == 0


def test_a_content_that_changes_meanwhile_is_read_from_its_start(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a digest only the ETag tells; two halves of different contents would pass unseen."""
    server.cuts["towns.json"] = [4]
    monkeypatch.setattr(pinned_file.time, "sleep", lambda seconds: server.files.update({"towns.json": b"X" * 30}))
    assert UrlFile(url=f"{server.url}/towns.json", sha256=None).fetch().read_bytes() == b"X" * 30
    assert server.starts == [0, 0]


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


@pytest.mark.parametrize(("code", "requests"), [(503, 3), (429, 3), (404, 1), (403, 1)])
def test_only_temporary_failures_are_tried_again(server: FileServer, code: int, requests: int) -> None:
    server.failures["towns.json"] = [code, code]
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    if requests == 1:
        with pytest.raises(EditingError, match=f"HTTP Error {code}"):
            file.fetch()
    else:
        assert file.fetch().read_bytes() == CONTENT
    assert server.requests["towns.json"] == requests


def test_a_full_disk_and_an_unreachable_address_fail_at_once(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(pinned_file.time, "sleep", waits.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pinned_file._Transfer, "_receive", full)
        with pytest.raises(EditingError, match="No space left"):
            UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch()
    with pytest.raises(EditingError, match="cannot be downloaded: URLError"):
        UrlFile(url="http://127.0.0.1:9/towns.json", sha256=DIGEST).fetch()
    assert not waits


def test_calls_at_once_download_once(server: FileServer) -> None:
    file = UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST)
    with ThreadPoolExecutor(4) as threads:
        assert {path.read_bytes() for path in threads.map(lambda _: file.fetch(), range(4))} == {CONTENT}
    assert server.requests["towns.json"] == 1


# ------------------------------------------------------------------ servers that hold a download


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX: ",  # in the header
        HEAD,  # in the body
        b"HTTP/1.1 200 OK\r\n\r\n",  # of unknown length
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1",  # between two chunks
    ],
)
def test_a_server_that_sends_byte_by_byte_holds_no_download(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_file, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(pinned_file, "ATTEMPTS", 2)
    start = time.monotonic()
    with serve_raw(drip(head)) as server:
        with pytest.raises(EditingError, match=r"TimeoutError: fewer than 30,000 bytes in 0\.1 seconds.* put it at"):
            UrlFile(url=f"{server.url}/towns.json", sha256=DIGEST).fetch()
        assert len(server.lines) == 2
    assert time.monotonic() - start < 10


def test_a_slow_download_is_not_ended_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 60
    monkeypatch.setattr(pinned_file, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(pinned_file, "MIN_BYTES", 1000)

    def respond(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        for start in range(0, len(content), 1024):
            connection.sendall(content[start : start + 1024])
            time.sleep(0.04)

    with serve_raw(respond) as server:
        file = UrlFile(url=f"{server.url}/towns.json", sha256=hashlib.sha256(content).hexdigest())
        assert file.fetch().read_bytes() == content and len(server.lines) == 1
