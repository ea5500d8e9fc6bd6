"""Where records come from: the embedded sample, the Hugging Face hub, or a path; all of them checked before use."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.options import choice

logger = logging.getLogger("lm_eval.editing_tasks")


T = TypeVar("T")


MINI, HUB = "mini", "hub"


WAYS_OUT = (
    "Ways out: data=mini for the embedded sample, data=/path/to/file-or-folder for a copy you have, "
    "or a network connection (or a filled Hugging Face cache) for data=hub."
)


MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one benchmark's records live.

    Args:
        name: name of the benchmark, for messages.
        hub_id: dataset repository on the Hugging Face hub.
        files: accepted file names, the published one first (it is the one fetched from the hub). A folder given as
            ``data=`` is searched for them.
        mini: the embedded sample.
    """

    name: str
    hub_id: str
    files: Sequence[str]
    mini: Path


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """Checked records, and where they came from (JSON-able; goes to the results)."""

    records: list[T]
    source: dict[str, Any]


def load(source: Source, settings: Mapping[str, Any], parse: Callable[[Mapping[str, Any], int, str], T]) -> Loaded[T]:
    """Read and check every record of a benchmark before anything is returned.

    Args:
        source: the benchmark's files.
        settings: a task's metadata. Read: ``data`` (mini, hub or a path; default mini without ``pretrained``, else
            hub), ``data_revision`` (hub revision; ``revision`` is the model's), ``bad_records`` (error or skip).
        parse: (record, row, where) -> typed record; raises EditingError for a record that violates the schema.

    Raises:
        EditingError: unreachable data (with the ways out), malformed JSON (file and line), bad records (file, record
            number, field, remedy; the first few of them).
    """
    data = _meant_for(source, which_data(settings), settings)
    path, described = _locate(source, data, settings)
    rows = read_rows(path)
    records, skipped = _parse_all(rows, path, parse, choice(settings, "bad_records", ("error", "skip"), "error"))
    described |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "records": len(records)}
    if skipped:
        logger.warning("%s: %d of %d records skipped, see data_source in the results", path, len(skipped), len(rows))
        described["skipped"] = skipped
    return Loaded(records, described)


def which_data(settings: Mapping[str, Any]) -> str:
    """``data`` of the settings; without one, the sample in a demo (no ``pretrained``), else the published data."""
    data = settings.get("data")
    if data is None:
        return HUB if settings.get("pretrained") else MINI
    if not isinstance(data, (str, Path)) or not str(data):
        raise EditingError(f"data={data!r} is not a place to read from. {WAYS_OUT}")
    return str(data)


def _meant_for(source: Source, data: str, settings: Mapping[str, Any]) -> str:
    """``data`` for this benchmark: a file that carries another benchmark's published name is not meant for it.

    With tasks of two benchmarks, ``data=QAEdit.json`` gives QAEdit its file; the other one has its default data, and
    says so in the log and in the results.
    """
    path = Path(data).expanduser()
    if data in (MINI, HUB) or path.name in source.files or not path.is_file():
        return data
    from lm_eval_tasks.common.benchmarks import benchmark_files  # reads the benchmarks' records, which read us

    owner = benchmark_files().get(path.name)
    if owner is None or owner == source.name:
        return data
    default = which_data({key: value for key, value in settings.items() if key != "data"})
    logger.warning("data=%s is %s's file; %s takes its default, data=%s.", path, owner, source.name, default)
    return default


def _locate(source: Source, data: str, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    if data == MINI:
        if not source.mini.is_file():
            raise EditingError(
                f"{source.name} has no embedded sample ({source.mini.name} is missing). "
                f"Take data=hub or data=/path, with a file like {source.files[0]} of {source.hub_id}."
            )
        return source.mini, {"data": MINI, "file": source.mini.name}
    if data == HUB:
        return _fetch(source, settings.get("data_revision") or "main")
    path = _search(source, Path(data).expanduser())
    return path, {"data": data, "file": path.name}


def _fetch(source: Source, revision: str) -> tuple[Path, dict[str, Any]]:
    """Download one data file (no dataset script, no remote code); HF_HUB_OFFLINE and the cache are respected."""
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(source.hub_id, source.files[0], repo_type="dataset", revision=revision)
    except Exception as error:  # the hub client raises errors of several libraries, httpx and OSError among them
        raise EditingError(
            f"{source.files[0]} of the Hugging Face dataset {source.hub_id} (revision {revision}) cannot be reached: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}. "
            f"{WAYS_OUT}"
        ) from error
    path = Path(found)
    # The cache keeps files under snapshots/<commit>/: the commit a branch name resolved to.
    commit = path.parent.name if path.parent.parent.name == "snapshots" else None
    return path, {"data": HUB, "hub_id": source.hub_id, "revision": revision, "commit": commit, "file": path.name}


def _search(source: Source, place: Path) -> Path:
    """A file as given, or the first accepted file name found in a folder or its sub-folders."""
    if place.is_file():
        return place
    if not place.is_dir():
        words = near_misses(str(place), (MINI, HUB))
        raise EditingError(f"data={place} is neither mini, hub, a file nor a folder.{words} {WAYS_OUT}")
    for name in source.files:
        if found := sorted(place.rglob(name)):
            return found[0]
    raise EditingError(
        f"no file of {source.name} in folder {place}; looked for {', '.join(source.files)}. "
        f"Put one there, or give the file itself. {WAYS_OUT}"
    )


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """The records of a JSON list or JSONL file as (where, record), ``where`` naming file and record (and line).

    Raises:
        EditingError: naming file and line, for text that is not JSON or not UTF-8, a JSON file that is not a list,
            and a file without records.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EditingError(f"{path} is not UTF-8 text (byte {error.start}); give the JSON or JSONL file.") from error
    rows = list(_json_list(path, text) if text.lstrip().startswith("[") else _json_lines(path, text))
    if not rows:
        raise EditingError(f"{path} holds no records; a JSON list or one JSON object per line is needed.")
    return rows


def _json_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise EditingError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}). Fix or re-download it."
        ) from error
    for number, record in enumerate(records):
        yield f"{path.name}, record {number}", record


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    number = 0
    # Not splitlines(): it also breaks at characters such as U+2028, which JSON allows inside a string.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise EditingError(
                f"{path}, line {line_number}: not valid JSON ({error.msg}). Fix or remove the line."
            ) from error
        yield f"{path.name}, record {number} (line {line_number})", record
        number += 1


def _parse_all(
    rows: Sequence[tuple[str, Any]], path: Path, parse: Callable[[Mapping[str, Any], int, str], T], bad_records: str
) -> tuple[list[T], dict[str, str]]:
    """Parse every row before judging the file; returns the records and, with ``skip``, the reasons of the others."""
    records: list[T] = []
    problems: dict[str, str] = {}
    for row, (where, record) in enumerate(rows):
        try:
            if not isinstance(record, Mapping):
                raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
            records.append(parse(record, row, where))
        except EditingError as error:
            problems[where] = str(error)
    if problems and (bad_records == "error" or not records):
        listed = list(problems.values())[:MAX_LISTED]
        more = f"\n... and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise EditingError(
            f"{path}: {len(problems)} of {len(rows)} records cannot be used:\n"
            + "\n".join(listed)
            + f"{more}\nFix them, or set bad_records=skip to leave them out (they are counted in the results)."
        )
    return records, problems
