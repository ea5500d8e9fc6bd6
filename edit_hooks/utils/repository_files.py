"""Files of public repositories, pinned by commit and SHA-256 and downloaded at run time.

Data and wordings that other people published stay in their repositories; this package names them and checks what it
gets. A file is downloaded once, to ``<cache>/repositories/<owner>/<name>/<commit>/<path>``.
"""

from __future__ import annotations

import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, replacing, sha256_of

HOST = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 60.0
MAX_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class RepositoryFile:
    """One version of one file of a public repository.

    Attributes:
        repository: ``owner/name``.
        commit: full commit hash.
        path: the file's path inside the repository.
        sha256: hexadecimal digest of its content.
    """

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def url(self) -> str:
        """Address of the raw file."""
        return f"{HOST}/{self.repository}/{self.commit}/{self.path}"

    @property
    def cached_path(self) -> Path:
        """Where the downloaded file is kept."""
        return cache_root() / "repositories" / self.repository / self.commit / self.path

    def fetch(self) -> Path:
        """Return the path of the checked file, downloading it if the cache has no intact copy.

        Raises:
            EditingError: if there is no network, if the content is another one, or if the cache cannot be written.
        """
        path = self.cached_path
        try:
            if path.is_file() and sha256_of(path) == self.sha256:
                return path
            content = self._download()
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(content)
                if (found := sha256_of(temporary)) != self.sha256:
                    raise EditingError(
                        f"{self.url} has the SHA-256 {found}; {self.sha256} is expected. The download is incomplete or "
                        "the file was replaced; try again, and report it if it happens twice."
                    )
        except OSError as error:
            raise EditingError(
                f"{self.path} of {self.repository} (commit {self.commit[:7]}) cannot be fetched: {error}. Without a "
                f"network download {self.url} elsewhere and save it as {path}."
            ) from error
        return path

    def _download(self) -> bytes:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise OSError("HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(self.url, timeout=TIMEOUT_SECONDS) as response:
            content: bytes = response.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES} bytes")
        return content
