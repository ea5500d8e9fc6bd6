"""Content-addressed store on disk for finished edits and other results.

Layout: ``<root>/deltas/<2 hex>/<key>.safetensors``, ``<root>/trainings`` alike for states of unfinished trainings,
``<root>/json/<kind>/<key>.json``, ``<root>/answers.sqlite`` and a marker file. A key is the SHA-256 of the complete
description of a result. The description is stored with the content and compared on reading. Files are written
atomically, so several processes may share a store, and one of them may prune it: what is gone is computed again. Only a
stream of updates too large for memory reads finished steps again and ends with an error if they are gone. A damaged
file is logged, removed and computed again; a file that cannot be written is logged, and the run goes on.
See ``docs/explain/design/store-keys.md``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edit_hooks.deltas.delta import Delta
from edit_hooks.store.layout import (
    ANSWERS,
    DELTAS,
    JSON,
    LOCKS,
    MARKER,
    TRAININGS,
    StoredFile,
    is_marked,
    mark,
    stored_files,
)
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import (
    cache_root,
    remove_leftovers,
    require_folder,
    set_aside,
    size_text,
    write_atomically,
    write_to_cache,
)
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import json_text, read_json
from edit_hooks.utils.storage.locks import locked
from edit_hooks.utils.storage.sqlite_cache import remove_database

log = get_logger("lm_eval.edited_hf")

Content = TypeVar("Content")

# Edits do not take the last space of a disk: this much, or a share of a small disk, stays for others.
RESERVED_BYTES, RESERVED_SHARE = 2 * 2**30, 20
LARGE_BYTES = 2**20  # smaller edits are stored without a look at the disk


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything that a stored result depends on; its hash is the result's key.

    Attributes:
        what: kind of result.
        model: the parts of a :class:`~edit_hooks.modeling.fingerprint.identity.ModelIdentity`.
        code: fingerprint of the code behind the result.
        inputs: all other inputs (JSON-able): editor, configuration, requests, ...
    """

    what: str
    model: Mapping[str, Any]
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
        self._is_full = False

    def load_delta(self, description: Description) -> Delta | None:
        """Return the edit stored under this description, or ``None``."""
        return self.load_delta_of_key(description.key)

    def load_delta_of_key(self, key: str) -> Delta | None:
        """Return the edit whose description has this key, or ``None``."""
        path = self._delta_path(key)
        return self._read(path, lambda: _checked_delta(path, key))

    def has_delta(self, description: Description) -> bool:
        """Whether there is a file of this edit; it is checked when it is read."""
        return self._delta_path(description.key).is_file()

    def expect(self, count: int, num_bytes: int) -> bool:
        """Warn if edits of a size will not fit on the disk, before they are stored; returns whether they do."""
        free = self._free_bytes()
        fits = free is None or count * num_bytes <= free
        if not fits:
            log.warning(
                "the store %s has room for %s, and %d edits of %s take %s: later ones will not be stored, and the next "
                "run makes them again. Name a folder on a larger disk (store=DIR), or remove old results "
                "(lm-edit cache prune --max-size 5GB).",
                *(self.root, size_text(max(free or 0, 0)), count, size_text(num_bytes), size_text(count * num_bytes)),
            )
        return fits

    def _free_bytes(self) -> int | None:
        """Bytes of the disk that the store may take: it leaves some to others; ``None`` if that is not known."""
        folder = self.root
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            return None
        return usage.free - min(RESERVED_BYTES, usage.total // RESERVED_SHARE)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file of this size may be written; the last space of the disk stays free."""
        return num_bytes < LARGE_BYTES or (free := self._free_bytes()) is None or num_bytes <= free

    def save_delta(self, description: Description, delta: Delta) -> None:
        """Store a finished edit; the description is added to its metadata.

        A large edit that would take the last space of the disk is not stored, which is logged once.
        """
        path = self._delta_path(description.key)
        delta.meta["description"] = description.to_dict()
        if not self.has_room(delta.num_bytes):
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "the disk of the store %s is nearly full: edits of %s are no longer stored, and the next run makes "
                    "them again. Remove old results (lm-edit cache prune --max-size 5GB), or choose another folder.",
                    *(self.root, size_text(delta.num_bytes)),
                )
            return
        self._write(path, lambda: delta.save(path, absolute_paths=False))

    def load_training(self, description: Description) -> Delta | None:
        """Return the state of the unfinished training under this description, or ``None``."""
        path = self._delta_path(description.key, TRAININGS)
        return self._read(path, lambda: _checked_delta(path, description.key), "the training begins again")

    def save_training(self, description: Description, state: Delta) -> None:
        """Store the state of a training in place of its last one.

        Raises:
            EditingError: for numbers that are not finite.
        """
        path = self._delta_path(description.key, TRAININGS)
        state.meta["description"] = description.to_dict()
        self._write(path, lambda: state.save(path, absolute_paths=False))

    def remove_training(self, description: Description) -> None:
        """Remove the state of a training that is finished."""
        with contextlib.suppress(OSError):  # a store that is only read, or another process that has removed it
            self._delta_path(description.key, TRAININGS).unlink()

    def load_json(self, kind: str, description: Description) -> Any | None:
        """Return the result stored under this description, or ``None``."""
        path = self._json_path(kind, description.key)
        return self._read(path, lambda: _checked_json(path, description))

    def save_json(self, kind: str, description: Description, content: Any) -> None:
        """Store a JSON-able result."""
        path = self._json_path(kind, description.key)
        record = {"description": description.to_dict(), "content": content, "checksum": key_of(content)}
        self._write(path, lambda: write_atomically(path, json_text(record)))

    def size(self) -> dict[str, tuple[int, int]]:
        """Return number of files and bytes by kind."""
        totals: dict[str, tuple[int, int]] = {}
        for file in stored_files(self.root):
            count, size = totals.get(file.kind, (0, 0))
            totals[file.kind] = (count + 1, size + file.num_bytes)
        return totals

    def require_marked(self) -> None:
        """Raise EditingError for a folder with files and no marker of a store."""
        if self.root.is_dir() and any(self.root.iterdir()) and not is_marked(self.root):
            raise EditingError(
                f"{self.root} is no store: it has no marker {MARKER}. Name the folder of a store, or delete "
                "this folder yourself; nothing was removed."
            )

    def to_prune(self, max_bytes: int = 0) -> list[StoredFile]:
        """The least recently used files, so that at most ``max_bytes`` remain without them."""
        # A time in the future is that of another machine's clock; such a file is as old as any other.
        now = time.time()
        files = sorted(stored_files(self.root), key=lambda file: file.used_at if file.used_at <= now else 0.0)
        excess = sum(file.num_bytes for file in files) - max_bytes
        chosen = []
        for file in files:
            if excess <= 0:
                break
            excess -= file.num_bytes
            chosen.append(file)
        return chosen

    def prune(self, max_bytes: int = 0) -> int:
        """Remove the least recently used files until at most ``max_bytes`` remain.

        Runs may go on meanwhile, except streams of updates too large for memory, which read finished steps again.
        Other files in the folder are left alone.

        Returns:
            The number of files removed.

        Raises:
            EditingError: if a file cannot be removed.
        """
        files = self.to_prune(max_bytes)
        for file in files:
            try:
                remove_database(file.path) if file.path.name == ANSWERS else file.path.unlink(missing_ok=True)
            except OSError as error:
                raise EditingError(f"{error}; give write permission, or wait for the run that uses it.") from error
        return len(files)

    def remove_leftovers(self) -> int:
        """Remove temporary files of killed processes; return their number."""
        return remove_leftovers(self.root)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of this name, waiting for other processes.

        The operating system releases the lock of a process that dies.
        """
        with locked(self.root / LOCKS / f"{name}.lock", root=self.root):
            yield

    def _delta_path(self, key: str, folder: str = DELTAS) -> Path:
        return self.root / folder / key[:2] / f"{key}.safetensors"

    def _json_path(self, kind: str, key: str) -> Path:
        return self.root / JSON / kind / f"{key}.json"

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        mark(self.root)
        write_to_cache(path, write, self.root)

    def _read(
        self, path: Path, read: Callable[[], Content], consequence: str = "it is computed again"
    ) -> Content | None:
        try:
            content = read()
        except EditingError as error:
            if not os.path.lexists(path):  # never stored, or pruned by another process
                return None
            log.warning("%s; %s.", str(error).removesuffix("."), consequence)
            if os.access(path, os.R_OK):
                with contextlib.suppress(OSError):  # a read-only store
                    set_aside(path) if path.is_dir() else path.unlink()
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
            sizes = []
            for path in folder.rglob("*"):
                with contextlib.suppress(OSError):  # removed by another process
                    sizes += [path.stat().st_size] if path.is_file() else []
            totals[str(folder)] = (len(sizes), sum(sizes))
    return totals


def _checked_delta(path: Path, key: str) -> Delta:
    delta = Delta.load(path)
    if key_of(delta.meta.get("description")) != key:
        raise EditingError(f"{path} was stored under another description")
    return delta


def _checked_json(path: Path, description: Description) -> Any:
    try:
        record = read_json(path, finite=False)
        intact = record["checksum"] == key_of(record["content"]) and key_of(record["description"]) == description.key
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EditingError(f"cannot read {path}: {error}") from None
    if not intact:
        raise EditingError(f"{path} is damaged or was stored under another description")
    return record["content"]
