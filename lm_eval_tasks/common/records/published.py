"""Published files of benchmarks: on the Hugging Face hub, in a public repository, or at a plain address."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import sha256_of
from edit_hooks.utils.storage.json_io import read_rows
from edit_hooks.utils.storage.pinned_file import PinnedFile, UrlFile
from edit_hooks.utils.text.readable import readable

logger = get_logger("lm_eval.editing_tasks")

DEFAULT_REVISION = "main"
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
@readable
class HubFile:
    """Files of a dataset repository on the Hugging Face hub that hold one data set.

    Attributes:
        repository: ``owner/name``.
        paths: files in the repository, JSON, JSONL or Parquet; several are read one after another.
        revision: a commit hash; a branch such as ``main`` can change, which a warning names.
        sort_by: field with a whole number that restores the order of records which the files split; empty for the
            order of the files.
        sha256: digests of the files at ``revision``, in their order; empty where none are attested.
    """

    repository: str
    paths: Sequence[str]
    revision: str = DEFAULT_REVISION
    sort_by: str = ""
    sha256: Sequence[str] = ()


PublishedFile: TypeAlias = HubFile | PinnedFile | UrlFile


@dataclass(frozen=True)
class DataFiles:
    """Files on this machine that hold the records of one data set.

    Attributes:
        paths: the files, in order.
        origin: where they come from, for the results (JSON-able).
        sort_by: as in :class:`HubFile`.
    """

    paths: Sequence[Path]
    origin: dict[str, Any]
    sort_by: str = ""


def open_published(file: PublishedFile, data: str, revision: str | None, hint: str) -> DataFiles:
    """Download a published file, or find it in the cache.

    Args:
        data: the setting that chose it.
        revision: another revision of a hub dataset; the published one by default.
        hint: a sentence that ends the message about an unreachable file.

    Raises:
        EditingError: for a file that cannot be reached or has another content, and for a revision of a fixed file.
    """
    if isinstance(file, HubFile):
        if revision not in (None, file.revision):
            file = replace(file, revision=revision, sha256=())  # the digests are those of the published revision
        return _open_hub_file(file, data, hint)
    if revision not in (None, DEFAULT_REVISION):
        raise EditingError(f"data_revision={revision!r} has no meaning for data={data}, a fixed file; drop it.")
    path = file.fetch()
    if isinstance(file, PinnedFile):
        origin: dict[str, Any] = {"repository": file.repository, "commit": file.commit}
    else:
        origin = {"url": file.url, "pinned": file.sha256 is not None}
        if file.sha256 is None:
            _warn_unpinned(
                file.url, f"its first download is at {path}, and another content from there will be refused here"
            )
    return DataFiles([path], {"data": data, **origin, "file": file.name})


def _open_hub_file(file: HubFile, data: str, hint: str) -> DataFiles:
    """Download the files, or find them in the cache.

    No dataset script and no remote code runs. HF_HUB_OFFLINE is respected.
    """
    from huggingface_hub import hf_hub_download

    paths = []
    for name in file.paths:
        try:
            path = hf_hub_download(file.repository, name, repo_type="dataset", revision=file.revision)
        except Exception as error:  # the hub client raises errors of several libraries, httpx and OSError among them
            raise EditingError(
                f"{name} of the Hugging Face dataset {file.repository} (revision {file.revision}) cannot be reached: "
                f"{first_line(error)}. {hint}"
            ) from error
        paths.append(Path(path))
    for local, name, digest in zip(paths, file.paths, file.sha256, strict=False):
        if sha256_of(local) != digest:
            raise EditingError(
                f"{name} of the Hugging Face dataset {file.repository} has another content than published: its sha256 "
                f"differs. Remove {local} to download it again; a proxy or a full disk may have changed it."
            )
    commit = _snapshot_commit(paths[0], file.paths[0])
    pinned = COMMIT.fullmatch(file.revision) is not None
    if not pinned:
        advice = f"this run reads commit {commit}; data_revision={commit} pins it" if commit else "set data_revision"
        _warn_unpinned(f"revision {file.revision!r} of the Hugging Face dataset {file.repository}", advice)
    names = ", ".join(PurePosixPath(name).name for name in file.paths)
    hub = {"hub_id": file.repository, "revision": file.revision, "commit": commit, "pinned": pinned}
    return DataFiles(paths, {"data": data, **hub, "file": names}, file.sort_by)


def _snapshot_commit(path: Path, name: str) -> str | None:
    """The commit to which a branch resolved: the cache keeps files under ``snapshots/<commit>/``."""
    root = path.parents[len(PurePosixPath(name).parts) - 1]
    return root.name if root.parent.name == "snapshots" else None


@functools.cache
def _warn_unpinned(what: str, advice: str) -> None:
    """Log once per process; every task of a group loads the file."""
    logger.warning("%s can change: %s. The results record the SHA-256.", what, advice)


def read_records(place: DataFiles, what: str, *, finite: bool = True) -> list[tuple[str, Any]]:
    """The records of all files, each after its location, as :func:`edit_hooks.utils.storage.json_io.read_rows`.

    Args:
        finite: refuse NaN and infinite numbers.

    Raises:
        EditingError: for an unreadable file, and a record without the whole number that ``sort_by`` names.
    """
    rows: list[tuple[str, Any]] = []
    for path in place.paths:
        rows += _read_parquet(path, what) if path.suffix == ".parquet" else read_rows(path, what, finite=finite)
    if place.sort_by:
        rows.sort(key=lambda row: _position(row[0], row[1], place.sort_by))
    return rows


def _position(where: str, record: object, field: str) -> int:
    value = record.get(field) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise EditingError(
            f"{where}: field {field!r} is {value!r}; the whole number that orders the records is needed."
        )
    return value


def _read_parquet(path: Path, what: str) -> list[tuple[str, Any]]:
    """The rows of a Parquet file, each after its location."""
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise EditingError(f"{what} {path} is no readable Parquet file: {first_line(error)}.") from error
    if not records:
        raise EditingError(f"{path} holds no records.")
    return [(f"{path.name}, record {row}", record) for row, record in enumerate(records)]
