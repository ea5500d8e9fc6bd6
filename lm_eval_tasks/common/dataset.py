"""Records from the embedded sample, the Hugging Face hub or a local path.

All records are checked before the first is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from edit_hooks.utils.errors import EditingError, first_line, near_misses
from edit_hooks.utils.files import sha256_of, user_path
from edit_hooks.utils.json_io import read_rows
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.pinned_file import PinnedFile
from lm_eval_tasks.common.cases import LeftOut
from lm_eval_tasks.common.fields import Fields
from lm_eval_tasks.common.settings import BAD_RECORDS, DATA_REVISION, Settings

logger = get_logger("lm_eval.editing_tasks")

RecordT = TypeVar("RecordT")

MINI, HUB = "mini", "hub"
DATA_HINT = (
    "Use data=mini for the embedded sample, data=/path/to/file-or-folder for a copy you have, "
    "or a network connection (or a filled Hugging Face cache) for data=hub."
)
DEFAULT_REVISION = "main"
MAX_LISTED = 5  # problems that one error message lists


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the records of one benchmark are.

    Attributes:
        title: name of the data set, for messages.
        hub_id: dataset repository on the Hugging Face hub; empty with ``published``.
        published: the file that ``data=hub`` reads, where it is not on the Hugging Face hub.
        files: accepted file names. The first is the published one, which is downloaded from the hub; a folder given as
            ``data=`` is searched for all of them.
        mini: the embedded sample, if there is one.
        mini_sets: other embedded samples by name, which ``data=mini:<name>`` chooses.
        sets: published selections of the records by name, which ``data=hub:<name>`` chooses.
        notes: fields of the embedded sample that only describe a record to its readers.
        foreign_fields: fields that only records of another layout have -> that layout and what to do, for the error.
    """

    title: str
    hub_id: str = ""
    published: PinnedFile | None = None
    files: Sequence[str]
    mini: Path | None = None
    mini_sets: Mapping[str, Path] = field(default_factory=dict)
    sets: Mapping[str, PinnedFile] = field(default_factory=dict)
    notes: Sequence[str] = ()
    foreign_fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def repository(self) -> str:
        """Name of the public repository that ``data=hub`` reads."""
        return self.published.repository if self.published else self.hub_id

    def named_sets(self, origin: str) -> Mapping[str, Path | PinnedFile]:
        """The sets that follow ``mini`` or ``hub`` in the setting ``data``, by name."""
        return self.mini_sets if origin == MINI else self.sets


@dataclass(frozen=True)
class Loaded(Generic[RecordT]):
    """Checked records, and their origin for the results (JSON-able)."""

    records: list[RecordT]
    source: dict[str, Any]


@dataclass
class _Parsed(Generic[RecordT]):
    """The outcome of parsing a file.

    Attributes:
        records: the usable records.
        problems: location of every other record -> reason.
        unknown_fields: path of a field that the parser did not read -> number of records with it.
        left_out: reason why the release leaves a record out -> number of such records.
    """

    records: list[RecordT] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    unknown_fields: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


def load_records(source: Source, settings: Settings, parse: Callable[[Fields, int], RecordT]) -> Loaded[RecordT]:
    """Read and check every record of a benchmark.

    Args:
        source: the files of the benchmark.
        settings: a task's metadata. Read here: ``data`` (mini, hub, a set as in hub:set, or a path; see
            :func:`choose_data`), ``data_revision`` (hub revision of the data; ``revision`` is the model's),
            ``bad_records`` (error or skip).
        parse: (fields of a record, row number from 0) -> record; raises EditingError if the record violates the schema.

    Fields that ``parse`` does not read are counted in the result's ``source`` and named in one warning.

    Raises:
        EditingError: for unreachable data (with the remedies), malformed JSON (with file and line) and bad records
            (with file, record number, field and remedy of the first few).
    """
    path, origin = _locate(source, choose_data(settings), settings)
    rows = read_rows(path, f"file of {source.title}")
    parsed = _parse_all(rows, path, functools.partial(_parse_layout, source, parse), BAD_RECORDS.read(settings))
    origin |= {"sha256": sha256_of(path), "records": len(parsed.records)}
    if skipped := parsed.problems:
        logger.warning("%s: %d of %d records skipped, see data_source in the results", path, len(skipped), len(rows))
        origin["skipped"] = skipped
    if parsed.left_out:
        origin["left_out"] = dict(sorted(parsed.left_out.items()))
    if parsed.unknown_fields:
        origin["unknown_fields"] = dict(sorted(parsed.unknown_fields.items()))
        _warn_of_unknown_fields(str(path), source.title, tuple(origin["unknown_fields"].items()))
    return Loaded(parsed.records, origin)


@functools.cache
def _warn_of_unknown_fields(path: str, title: str, counts: Sequence[tuple[str, int]]) -> None:
    """Log once per process; every task of a group loads the file."""
    listed = ", ".join(f"{name} ({count} records)" for name, count in counts)
    logger.warning("%s: fields that %s does not use are ignored: %s.", path, title, listed)


def _parse_layout(source: Source, parse: Callable[[Fields, int], RecordT], fields: Fields, row: int) -> RecordT:
    """Parse a record unless it has a field of another layout, which the parser would ignore."""
    for name, remedy in source.foreign_fields.items():
        if name in fields.record:
            raise EditingError(f"{fields.where}: field {name!r} does not belong to {source.title}: {remedy}")
    for name in source.notes:
        fields.optional(name)
    return parse(fields, row)


def choose_data(settings: Settings) -> str:
    """The setting ``data``.

    The default is the sample without ``pretrained`` (a demo), else the published data.
    """
    data = settings.get("data")
    if data is None:
        return HUB if settings.get("pretrained") else MINI
    if not isinstance(data, (str, Path)) or not str(data):
        raise EditingError(f"data={data!r} is not a place to read from. {DATA_HINT}")
    return str(data)


def named_set(data: str) -> tuple[str, str] | None:
    """Origin and name of a set, as in ``hub:inter_1k`` or ``mini:held_out``; ``None`` for other values of ``data``."""
    origin, colon, name = data.partition(":")
    return (origin, name) if colon and origin in (MINI, HUB) else None


def _locate(source: Source, data: str, settings: Settings) -> tuple[Path, dict[str, Any]]:
    """The file to read and the start of its description."""
    if data == MINI:
        if source.mini is None:
            raise EditingError(
                f"{source.title} has no embedded sample. Use data=hub or data=/path, with a file like "
                f"{source.files[0]} of {source.repository}."
            )
        return source.mini, {"data": MINI, "file": source.mini.name}
    if data == HUB:
        if source.published:
            return _open_fixed(source.published, data, settings)
        return _download(source, DATA_REVISION.read(settings) or DEFAULT_REVISION)
    if chosen := named_set(data):
        return _open_set(source, data, *chosen, settings)
    path = _search(source, user_path(data, "data"))
    return path, {"data": data, "file": path.name}


def _download(source: Source, revision: str) -> tuple[Path, dict[str, Any]]:
    """Download one data file, or find it in the cache.

    No dataset script and no remote code runs. HF_HUB_OFFLINE is respected.
    """
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(source.hub_id, source.files[0], repo_type="dataset", revision=revision))
    except Exception as error:  # the hub client raises errors of several libraries, httpx and OSError among them
        raise EditingError(
            f"{source.files[0]} of the Hugging Face dataset {source.hub_id} (revision {revision}) cannot be reached: "
            f"{first_line(error)}. {DATA_HINT}"
        ) from error
    # The cache keeps files under snapshots/<commit>/, with the commit to which a branch name resolved.
    commit = path.parent.name if path.parent.parent.name == "snapshots" else None
    return path, {"data": HUB, "hub_id": source.hub_id, "revision": revision, "commit": commit, "file": path.name}


def _open_set(source: Source, data: str, origin: str, name: str, settings: Settings) -> tuple[Path, dict[str, Any]]:
    """The file of another embedded sample, or of a published selection."""
    sets = source.named_sets(origin)
    if name not in sets:
        accepted = ", ".join([origin, *(f"{origin}:{known}" for known in sets)])
        raise EditingError(
            f"data={data}: {source.title} has no set {name!r}.{near_misses(name, sets)} Accepted: {accepted}."
        )
    return _open_fixed(sets[name], data, settings)


def _open_fixed(chosen: Path | PinnedFile, data: str, settings: Settings) -> tuple[Path, dict[str, Any]]:
    """An embedded file, or one that its commit and digest identify."""
    if (revision := settings.get("data_revision")) not in (None, DEFAULT_REVISION):
        raise EditingError(f"data_revision={revision!r} has no meaning for data={data}, a fixed file; drop it.")
    if isinstance(chosen, Path):
        return chosen, {"data": data, "file": chosen.name}
    where = {"repository": chosen.repository, "commit": chosen.commit, "file": chosen.name}
    return chosen.fetch(), {"data": data, **where}


def _search(source: Source, place: Path) -> Path:
    """The file itself, or the first accepted file name in a folder or its subfolders."""
    if place.is_file():
        return place
    if not place.is_dir():
        hint = near_misses(str(place), (MINI, HUB))
        raise EditingError(f"data={place} is neither mini, hub, a file nor a folder.{hint} {DATA_HINT}")
    for name in source.files:
        if matches := sorted(place.rglob(name)):
            return matches[0]
    raise EditingError(
        f"no file of {source.title} in folder {place}; looked for {', '.join(source.files)}. "
        f"Put one there, or give the file itself. {DATA_HINT}"
    )


def _parse_all(
    rows: Sequence[tuple[str, Any]], path: Path, parse: Callable[[Fields, int], RecordT], bad_records: str
) -> _Parsed[RecordT]:
    """Parse all rows; ``bad_records=skip`` leaves the bad ones out."""
    parsed: _Parsed[RecordT] = _Parsed()
    for row, (where, record) in enumerate(rows):
        try:
            if not isinstance(record, Mapping):
                raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
            fields = Fields(record, where)
            parsed_record = parse(fields, row)
            parsed.unknown_fields.update(fields.unread())
            parsed.records.append(parsed_record)
        except LeftOut as reason:
            parsed.left_out[str(reason)] += 1
        except EditingError as error:
            parsed.problems[where] = str(error)
    if parsed.problems and (bad_records == "error" or not parsed.records):
        listed = list(parsed.problems.values())[:MAX_LISTED]
        more = f"\n... and {len(parsed.problems) - MAX_LISTED} more" if len(parsed.problems) > MAX_LISTED else ""
        raise EditingError(
            f"{path}: {len(parsed.problems)} of {len(rows)} records cannot be used:\n"
            + "\n".join(listed)
            + f"{more}\nFix them, or set bad_records=skip to leave them out (they are counted in the results)."
        )
    if parsed.left_out and not parsed.records:
        raise EditingError(f"{path}: the benchmark leaves out all {len(rows)} records: {', '.join(parsed.left_out)}.")
    return parsed
