"""What a local judge's model is: the commit of a repository on the hub, or the content of a folder's files."""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edit_hooks.utils.storage.files import sha256_of
from edit_hooks.utils.storage.hashing import key_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
CONFIG = "config.json"


def folder_of(model: str) -> Path | None:
    """The folder that a model names; ``None`` for a repository on the hub."""
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else None


def folder_digest(folder: Path) -> str:
    """SHA-256 (hex) over names and contents of the files that can change a reply.

    Of a folder of many gigabytes this takes seconds, once per process and version of a file. Hidden files, documents
    and subfolders, which transformers does not read, do not count.
    """
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() not in (".md", ".pdf")
    )
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_digest, files))
    return key_of([[path.name, digest] for path, digest in zip(files, digests, strict=True)])


def _digest(file: Path) -> str:
    state = file.stat()
    return _digest_of_version(file.resolve(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of_version(file: Path, _size: int, _modified_ns: int) -> str:
    """SHA-256 (hex) of a file, cached until its size or its time of modification changes."""
    return sha256_of(file)


@functools.lru_cache
def commit_of(repository: str, revision: str | None) -> str | None:
    """The commit to which a revision of a model on the hub resolves; without a network, that of the cached files.

    The same for the whole process, whatever happens to the repository meanwhile.

    Returns:
        ``None`` if there is neither a network nor a cached configuration, or no such repository.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = Path(hf_hub_download(repository, CONFIG, revision=revision))
    except (OSError, ValueError, HfHubHTTPError):  # the backend names the reason when it reads the model
        return None
    commit = path.parent.name  # the cache keeps files under snapshots/<commit>/
    return commit if _COMMIT.fullmatch(commit) else None
