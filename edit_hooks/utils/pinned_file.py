"""Published files: of repositories at a commit, and of plain addresses, checked by SHA-256.

A file is downloaded at most once, verified, and kept in the user's cache. Its content is never part of this package,
and never executed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, replacing, sha256_of, write_atomically

HOST = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 30.0
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            with temporary.open("wb") as file:
                found = _download(url, file)
        except (OSError, http.client.HTTPException) as error:
            raise EditingError(f"{url} cannot be downloaded: {type(error).__name__}: {error}. {remedy}") from error
        if sha256 not in (None, found):
            raise EditingError(
                f"{url} has another content: its sha256 differs, so {mismatch}. Nothing was kept; a proxy may have "
                "changed it."
            )
    return path


def _download(url: str, file: IO[bytes]) -> str:
    """Write the content of an address to a file block by block; return its digest."""
    digest, size = hashlib.sha256(), 0
    with urllib.request.build_opener(_HttpsRedirects).open(url, timeout=TIMEOUT_SECONDS) as response:
        while block := response.read(BLOCK_BYTES):
            size += len(block)
            if size > MAX_BYTES:
                raise EditingError(f"{url} has more than {MAX_BYTES:,} bytes, the limit of a download.")
            digest.update(block)
            file.write(block)
        if missing := response.length:  # reading in blocks does not report a closed connection
            raise http.client.IncompleteRead(b"", missing)
    return digest.hexdigest()


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
