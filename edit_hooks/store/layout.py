"""Files of a store on disk: which ones belong to it, and how it is recognized.

Pruning deletes files, so a folder is a store only if it carries the marker file, and a file belongs to the store only
if its whole path has the form that the store writes. Links are not followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.storage.files import write_atomically, write_to_cache
from edit_hooks.utils.storage.sqlite_cache import tables_in

MARKER = ".lm-edit-store"
MARKER_TEXT = json.dumps({"format": "lm-eval-editing/store/1", "contents": "finished edits and answers"}) + "\n"

ANSWERS, ANSWERS_TABLE = "answers.sqlite", "answers"
DELTAS, TRAININGS, JSON, LOCKS = "deltas", "trainings", "json", "locks"

_DELTA = re.compile(rf"(?P<kind>{DELTAS}|{TRAININGS})/([0-9a-f]{{2}})/\2[0-9a-f]{{62}}\.safetensors")
_JSON = re.compile(r"json/(?P<kind>[a-z_]+)/[0-9a-f]{64}\.json")
_DAMAGED_ANSWERS = re.compile(r"answers\.sqlite\.damaged-\d+")


class StoredFile(NamedTuple):
    """A file of the store.

    Attributes:
        kind: ``deltas``, ``trainings``, ``answers`` or the kind of a JSON result.
        num_bytes: its size.
        used_at: time of the last use, in seconds since the epoch.
    """

    path: Path
    kind: str
    num_bytes: int
    used_at: float


def mark(root: Path) -> None:
    """Create the folder of a store and its marker, unless they exist."""
    marker = root / MARKER
    if not is_marked(root):
        write_to_cache(marker, lambda: write_atomically(marker, MARKER_TEXT))


def is_marked(root: Path) -> bool:
    """Whether the folder carries an intact marker."""
    try:
        return (root / MARKER).read_bytes() == MARKER_TEXT.encode()
    except OSError:
        return False


def stored_files(root: Path) -> list[StoredFile]:
    """All files of the store below ``root``; other files and links are left out, and so is a folder without marker."""
    if not is_marked(root):
        return []
    return [
        StoredFile(path, kind, status.st_size, status.st_mtime)
        for path, status in _regular_files(root)
        if (kind := _kind_of(root, path)) is not None
    ]


def _kind_of(root: Path, path: Path) -> str | None:
    """Kind of a stored file; ``None`` for all other files."""
    name = path.relative_to(root).as_posix()
    if match := _DELTA.fullmatch(name) or _JSON.fullmatch(name):
        return match["kind"]
    if name == ANSWERS:
        tables = tables_in(path)  # the one name that others may use, too; a damaged file has none
        return "answers" if not tables or tables == {ANSWERS_TABLE} else None
    return "answers" if _DAMAGED_ANSWERS.fullmatch(name) else None


def _regular_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in _all_files(root):
        with contextlib.suppress(OSError):  # removed by another process
            if not path.is_symlink() and path.is_file():
                yield path, path.stat()


def _all_files(root: Path) -> Iterator[Path]:
    """Files and links below ``root``, without following links."""
    for folder, subfolders, names in os.walk(root):
        links = [name for name in subfolders if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*names, *links]))
