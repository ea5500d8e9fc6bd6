"""Published files: of repositories at a commit, and of plain addresses, checked by SHA-256.

A file is downloaded at most once, verified, and kept in the user's cache. Its content is never part of this package,
and never executed. A download that breaks off, or nearly stops, is resumed, in the same call and, where the digest is
known, in later ones; the file appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, sha256_of, write_atomically
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.stalled import Watch

log = get_logger("lm_eval.edited_hf")

HOST = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 30.0
MIN_BYTES = 30_000  # of the content within this time: slower servers hold a run for days
ATTEMPTS, WAIT_SECONDS = 5, 1.0  # the wait doubles after each attempt
TEMPORARY_CODES = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
# Shown after two seconds, and only on a terminal.
PROGRESS: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": 2, "leave": False, "disable": None}
MAX_BYTES = 2 * 10**9  # twice the largest published file, the reference texts of CounterFact
BLOCK_BYTES = 1 << 20
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"  # the switch of the Hugging Face libraries; no request is sent where it is on
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class PinnedFile:
    """One version of one file of a GitHub repository.

    Attributes:
        repository: ``owner/name``.
        commit: full commit hash.
        path: path in the repository.
        sha256: hexadecimal digest of the content.
    """

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        """File name without folders."""
        return PurePosixPath(self.path).name

    @property
    def url(self) -> str:
        """Address of the content."""
        return f"{HOST}/{self.repository}/{self.commit}/{self.path}"

    @property
    def cached(self) -> Path:
        """Where the file is kept, whether or not it has been downloaded."""
        return cache_root() / "downloads" / self.sha256[:16] / self.name

    def fetch(self) -> Path:
        """Return the file, downloaded unless the cache has it.

        Raises:
            EditingError: if it is not cached and cannot be downloaded, or if the downloaded content has another digest.
        """
        return _fetch(self.url, self.cached, self.sha256, "it is not the pinned file")


@dataclass(frozen=True, kw_only=True)
class UrlFile:
    """A file at a plain address.

    Attributes:
        url: address of the content; https, also after a redirection.
        sha256: hexadecimal digest of the content. ``None`` where none is known: the digest of the first download is
            kept beside the file and checked from then on, so that a run never mixes two contents in silence.

    Raises:
        EditingError: for another scheme, an address without a file name, and text that is no digest.
    """

    url: str
    sha256: str | None

    def __post_init__(self) -> None:
        _require_https(self.url)
        if not self.name:
            raise EditingError(f"{self.url} names no file; the address of a file is needed.")
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise EditingError(f"sha256={self.sha256!r} is no SHA-256; 64 hexadecimal digits in lower case are needed.")

    @property
    def name(self) -> str:
        """File name without folders."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def cached(self) -> Path:
        """Where the file is kept, whether or not it has been downloaded."""
        key = self.sha256 or hashlib.sha256(self.url.encode()).hexdigest()
        return cache_root() / "downloads" / key[:16] / self.name

    @property
    def record(self) -> Path:
        """Where the digest of the first download is kept."""
        return self.cached.with_name(f"{self.name}.sha256")

    def fetch(self) -> Path:
        """Return the file, downloaded unless the cache has it.

        Raises:
            EditingError: as :meth:`PinnedFile.fetch`, and where the content differs from that of the first download.
        """
        if self.sha256:
            return _fetch(self.url, self.cached, self.sha256, "it is not the published file")
        if self.record.is_file():
            first = self.record.read_text(encoding="ascii").strip()
            reason = f"it has changed since the first download; remove {self.record} to accept the new content"
            return _fetch(self.url, self.cached, first, reason)
        path = _fetch(self.url, self.cached, None, "")
        write_atomically(self.record, f"{sha256_of(path)}\n")
        return path


def _fetch(url: str, path: Path, sha256: str | None, mismatch: str) -> Path:
    """Return the cached file if its digest is right, else download it.

    Args:
        sha256: the digest that the content must have; ``None`` accepts any.
        mismatch: the meaning of another digest, for the error.
    """
    if path.is_file() and (sha256 is None or sha256_of(path) == sha256):
        return path
    remedy = f"Download it on another machine and put it at {path}."
    if os.environ.get(OFFLINE_VARIABLE, "").lower() in ("1", "true", "yes", "on"):
        raise EditingError(f"{url} is not in the cache, and {OFFLINE_VARIABLE} forbids a download. {remedy}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # slow to import and rarely needed

        with FileLock(path.with_name(f".{path.name}.lock")):
            if not (path.is_file() and (sha256 is None or sha256_of(path) == sha256)):  # another process was faster
                partial = path.with_name(f".{path.name}.part")
                _download_and_keep(url, partial, sha256, mismatch, remedy)
                os.replace(partial, path)
    except OSError as error:
        raise EditingError(
            f"{url} cannot be kept in {path.parent}: {error.strerror or error}. Free some space there, or name another "
            "folder in the environment variable LM_EDIT_CACHE."
        ) from error
    return path


def _download_and_keep(url: str, partial: Path, sha256: str | None, mismatch: str, remedy: str) -> None:
    """Complete a partial file; say what is left of it if that fails."""
    try:
        _download_checked(url, partial, sha256, mismatch)
    except (OSError, http.client.HTTPException) as error:
        size = partial.stat().st_size if partial.exists() else 0
        kept = f" {size:,} bytes are kept, and the next try resumes there." if size else ""
        raise EditingError(f"{url} cannot be downloaded: {type(error).__name__}: {error}.{kept} {remedy}") from error


def _download_checked(url: str, partial: Path, sha256: str | None, mismatch: str) -> None:
    """Complete a partial file; a broken download stays for the next try if a digest will tell what it is worth.

    Raises:
        EditingError: for another digest, also of a download from the first byte.
    """
    if sha256 is None:
        partial.unlink(missing_ok=True)
        try:
            _download(url, partial)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return
    for resumed in (True, False) if partial.exists() else (False,):
        if not resumed:
            partial.unlink(missing_ok=True)
        _download(url, partial)
        if sha256_of(partial) == sha256:
            return
    partial.unlink()
    raise EditingError(
        f"{url} has another content: its sha256 differs, so {mismatch}. Nothing was kept; a proxy may have changed it."
    )


def _download(url: str, partial: Path) -> None:
    """Append to a file what it lacks of the content of an address, in several attempts."""
    transfer = _Transfer(url, partial)
    for attempt in range(ATTEMPTS):
        try:
            return transfer.run()
        except urllib.error.HTTPError as error:
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink(missing_ok=True)  # longer than the content, so of another one
            elif error.code < 500 and error.code not in TEMPORARY_CODES:
                raise
            last: OSError | http.client.HTTPException = error
        except urllib.error.URLError as error:
            if attempt == 0:
                raise  # the address cannot be reached at all
            last = error
        except (ConnectionError, TimeoutError, http.client.HTTPException) as error:  # not a full disk
            last = error
        if attempt + 1 < ATTEMPTS:
            log.info("%s: %s: %s; trying again.", url, type(last).__name__, last)
            time.sleep(WAIT_SECONDS * 2**attempt)
    raise last


class _Transfer:
    """Requests for one address. Each asks for what the file lacks, of the content that the first one began."""

    def __init__(self, url: str, partial: Path) -> None:
        self.url, self.partial = url, partial
        self.etag: str | None = None

    def run(self) -> None:
        """One request.

        Raises:
            OSError, http.client.HTTPException: for a connection that fails or breaks off.
            EditingError: for a content above the limit; the file is removed.
        """
        size = self.partial.stat().st_size if self.partial.exists() else 0
        headers = {"Range": f"bytes={size}-"} if size else {}
        if size and self.etag:
            headers["If-Range"] = self.etag
        request = urllib.request.Request(self.url, headers=headers)
        with (
            Watch(TIMEOUT_SECONDS, MIN_BYTES) as watch,
            watch.opener(_HttpsRedirects()).open(request, timeout=TIMEOUT_SECONDS) as response,
        ):
            watch.receive(0)
            if response.status != http.client.PARTIAL_CONTENT:
                size = 0  # the whole content, from a server without ranges or with another content by now
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {size}-"):
                raise http.client.HTTPException("the reply has another range than that asked for")
            etag = response.headers.get("ETag", "")
            self.etag = None if etag.startswith("W/") else etag or None  # ranges need a strong one
            self._receive(response, size, watch)

    def _receive(self, response: http.client.HTTPResponse, size: int, watch: Watch) -> None:
        """Write the body behind the first ``size`` bytes of the file."""
        total = size + response.length if response.length is not None else None
        bar = tqdm(desc=self.partial.name.strip(".").removesuffix(".part"), total=total, initial=size, **PROGRESS)
        with self.partial.open("ab" if size else "wb") as file, bar:
            while block := response.read1(BLOCK_BYTES):  # what is there; read() waits for a whole block
                size += len(block)
                watch.receive(len(block))
                if size > MAX_BYTES:
                    self.partial.unlink()
                    raise EditingError(f"{self.url} has more than {MAX_BYTES:,} bytes, the limit of a download.")
                file.write(block)
                bar.update(len(block))
        if total is not None and size < total:  # reading in blocks does not report a closed connection
            raise http.client.IncompleteRead(b"", total - size)


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    """Redirections that stay with https."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        _require_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_https(url: str) -> None:
    """Refuse an address that anyone between could answer; this machine may serve plain http."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise EditingError(f"{url} is not an https address; give one.")
