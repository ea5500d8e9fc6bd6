"""Content-addressed store on disk for finished edits and other results.

Layout: ``<root>/deltas/<2 hex>/<key>.safetensors`` and ``<root>/json/<kind>/<key>.json``. A key is the SHA-256 of the
complete description of a result. The description is stored with the content and compared on reading. Files are written
atomically, so several processes may share a store. A damaged file is logged, removed and computed again. See
``docs/design/store-keys.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edit_hooks.deltas.delta import Delta
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, remove_leftovers, require_folder, write_atomically
from edit_hooks.utils.hashing import key_of
from edit_hooks.utils.json_io import read_json
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

Content = TypeVar("Content")

STORED_SUFFIXES = (".safetensors", ".json", ".sqlite")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything that a stored result depends on; its hash is the result's key.

    Attributes:
        what: kind of result.
        model: fingerprint of the model.
        code: fingerprint of the code behind the result.
        inputs: all other inputs (JSON-able): editor, configuration, requests, ...
    """

    what: str
    model: str
    code: str
    inputs: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON-able mapping."""
        assert not {"what", "model", "code"} & set(self.inputs)
        return {"what": self.what, "model": self.model, "code": self.code, **self.inputs}

    @property
    def key(self) -> str:
        return key_of(self.to_dict())


class Store:
    """Finished edits (safetensors) and small results (JSON) by their description.

    Args:
        root: folder of the store, created at the first write; ``~`` is expanded. By default in :func:`cache_root`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = require_folder(root if root is not None else cache_root() / "store", "store")

    def load_delta(self, description: Description) -> Delta | None:
        """Return the edit stored under this description, or ``None``."""
        path = self._delta_path(description.key)
        return self._read(path, lambda: _checked_delta(path, description))

    def save_delta(self, description: Description, delta: Delta) -> None:
        """Store a finished edit; the description is added to its metadata."""
        path = self._delta_path(description.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        delta.meta["description"] = description.to_dict()
        delta.save(path)

    def load_json(self, kind: str, description: Description) -> Any | None:
        """Return the result stored under this description, or ``None``."""
        path = self._json_path(kind, description.key)
        return self._read(path, lambda: _checked_json(path, description))

    def save_json(self, kind: str, description: Description, content: Any) -> None:
        """Store a JSON-able result."""
        path = self._json_path(kind, description.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"description": description.to_dict(), "content": content, "checksum": key_of(content)}
        write_atomically(path, json.dumps(record, ensure_ascii=False))

    def size(self) -> dict[str, tuple[int, int]]:
        """Return number of files and bytes by kind."""
        totals: dict[str, tuple[int, int]] = {}
        named = {".safetensors": "deltas", ".sqlite": "answers"}
        for path, status in self._files():
            kind = named.get(path.suffix, path.parent.name)
            count, size = totals.get(kind, (0, 0))
            totals[kind] = (count + 1, size + status.st_size)
        return totals

    def prune(self, max_bytes: int = 0) -> int:
        """Remove the least recently used files until at most ``max_bytes`` remain.

        Returns:
            The number of files removed.
        """
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        removed = 0
        for path, status in files:
            if total <= max_bytes:
                break
            total -= status.st_size
            path.unlink(missing_ok=True)
            removed += 1
        return removed

    def remove_leftovers(self) -> int:
        """Remove temporary files of killed processes; return their number."""
        return remove_leftovers(self.root)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of this name, waiting for other processes.

        The operating system releases the lock of a process that dies.
        """
        from filelock import FileLock

        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):
            yield

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        for path in self.root.rglob("*") if self.root.is_dir() else ():
            if path.suffix in STORED_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):  # pruned by another process
                    files.append((path, path.stat()))
        return files

    def _delta_path(self, key: str) -> Path:
        return self.root / "deltas" / key[:2] / f"{key}.safetensors"

    def _json_path(self, kind: str, key: str) -> Path:
        return self.root / "json" / kind / f"{key}.json"

    def _read(self, path: Path, read: Callable[[], Content]) -> Content | None:
        if not path.exists():
            return None
        try:
            content = read()
        except EditingError as error:
            log.warning("%s; it is removed and computed again.", error)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # a read-only store, or a file that another process has just pruned
            os.utime(path)  # time of last use, for pruning
        return content


def sizes_outside_store(store: Store) -> dict[str, tuple[int, int]]:
    """Return number of files and bytes by folder of the caches outside the store."""
    root = cache_root()
    totals = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and folder.resolve() != store.root.resolve():
            files = [path for path in folder.rglob("*") if path.is_file()]
            totals[str(folder)] = (len(files), sum(path.stat().st_size for path in files))
    return totals


def _checked_delta(path: Path, description: Description) -> Delta:
    delta = Delta.load(path)
    if key_of(delta.meta.get("description")) != description.key:
        raise EditingError(f"{path} was stored under another description")
    return delta


def _checked_json(path: Path, description: Description) -> Any:
    try:
        record = read_json(path, finite=False)
        intact = record["checksum"] == key_of(record["content"]) and key_of(record["description"]) == description.key
    except (ValueError, KeyError, TypeError) as error:
        raise EditingError(f"cannot read {path}: {error}") from None
    if not intact:
        raise EditingError(f"{path} is damaged or was stored under another description")
    return record["content"]
