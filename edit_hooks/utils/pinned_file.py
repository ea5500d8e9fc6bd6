"""Files of public repositories, pinned by commit and SHA-256.

A pinned file is downloaded at most once, verified, and kept in the user's cache. Its content is never part of this
package, and never executed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, replacing, sha256_of

HOST = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 30.0
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"  # the switch of the Hugging Face libraries; no request is sent where it is on


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
        path = self.cached
        if path.is_file() and sha256_of(path) == self.sha256:
            return path
        content = self._download()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise EditingError(
                f"{self.url} is not the pinned file: its sha256 differs. Nothing was kept; a proxy may have changed it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    def _download(self) -> bytes:
        remedy = f"Download it on another machine and put it at {self.cached}."
        if os.environ.get(OFFLINE_VARIABLE, "").lower() in ("1", "true", "yes", "on"):
            raise EditingError(f"{self.url} is not in the cache, and {OFFLINE_VARIABLE} forbids a download. {remedy}")
        try:
            with urllib.request.urlopen(self.url, timeout=TIMEOUT_SECONDS) as response:
                content: bytes = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EditingError(f"{self.url} cannot be downloaded: {type(error).__name__}: {error}. {remedy}") from error
        return content
