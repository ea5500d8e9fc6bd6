"""Published files: of repositories at a commit, and of plain addresses, checked by SHA-256.

A file is downloaded at most once, verified, and kept in the user's cache. Its content is never part of this package,
and never executed. `huggingface_hub` transfers it: it retries, resumes a download that breaks off, and shows progress.
A file with a known digest is also resumed in later calls. It appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import http
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import cache_root, sha256_of, write_atomically

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HOST = "https://raw.githubusercontent.com"
MAX_BYTES = 2 * 10**9  # twice the largest published file, the reference texts of CounterFact
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
        url: address of the content; https.
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

    @classmethod
    def at_commit(cls, repository: str, commit: str, path: str, sha256: str | None = None) -> UrlFile:
        """A file of a GitHub repository at a commit, so that its content is fixed; its digest need not be known."""
        return cls(url=f"{HOST}/{repository}/{commit}/{path}", sha256=sha256)

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
    if _is_cached(path, sha256):
        return path
    from filelock import FileLock  # both are slow to import and rarely needed
    from huggingface_hub import constants

    remedy = f"Download it on another machine and put it at {path}."
    if constants.HF_HUB_OFFLINE:
        raise EditingError(f"{url} is not in the cache, and HF_HUB_OFFLINE forbids a download. {remedy}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not _is_cached(path, sha256):  # another process was faster
                partial = path.with_name(f".{path.name}.part")
                _download(url, partial, sha256, mismatch, remedy)
                os.replace(partial, path)
    except OSError as error:
        raise EditingError(
            f"{url} cannot be kept in {path.parent}: {error.strerror or error}. Free some space there, or name another "
            "folder in the environment variable LM_EDIT_CACHE."
        ) from error
    return path


def _is_cached(path: Path, sha256: str | None) -> bool:
    return path.is_file() and (sha256 is None or sha256_of(path) == sha256)


def _download(url: str, partial: Path, sha256: str | None, mismatch: str, remedy: str) -> None:
    """Complete a partial file, once more from the first byte if the completed file has another digest.

    Raises:
        EditingError: the transfer fails, or a download from the first byte has another digest.
        OSError: the file cannot be written.
    """
    for resumed in (True, False) if sha256 and partial.exists() else (False,):
        if not resumed:
            partial.unlink(missing_ok=True)
        if _transfer(url, partial, keep=sha256 is not None, remedy=remedy) and sha256 in (None, sha256_of(partial)):
            return
    partial.unlink()
    raise EditingError(
        f"{url} has another content: its sha256 differs, so {mismatch}. Nothing was kept; a proxy may have changed it."
    )


def _transfer(url: str, partial: Path, keep: bool, remedy: str) -> bool:
    """Append to a file what it lacks of the content; return whether the server had such a rest.

    Args:
        keep: a partial file stays after a failure, for a later call.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    size = partial.stat().st_size if partial.exists() else 0
    try:
        with _LimitedFile(partial) as file:
            http_get(url, file, resume_size=size, displayed_filename=partial.name.strip(".").removesuffix(".part"))
    except EditingError:
        partial.unlink()
        raise
    except Exception as error:  # httpx or its successor, by the release of huggingface_hub, or OSError
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if size and status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return False  # the file is longer than the content, so of another one
        if not keep:
            partial.unlink()
        size = partial.stat().st_size if partial.exists() else 0
        kept = f" {size:,} bytes are kept, and the next try resumes there." if size else ""
        raise EditingError(f"{url} cannot be downloaded: {first_line(error)}.{kept} {remedy}") from error
    return True


class _LimitedFile(io.BufferedWriter):
    """A file to append to, of at most :data:`MAX_BYTES`."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._name = path.name.strip(".").removesuffix(".part")

    def write(self, buffer: ReadableBuffer, /) -> int:
        if self.tell() + memoryview(buffer).nbytes > MAX_BYTES:
            raise EditingError(f"the download {self._name} has more than {MAX_BYTES:,} bytes, the limit of a file.")
        return super().write(buffer)


def _require_https(url: str) -> None:
    """Refuse an address that anyone between could answer; this machine may serve plain http."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise EditingError(f"{url} is not an https address; give one.")
