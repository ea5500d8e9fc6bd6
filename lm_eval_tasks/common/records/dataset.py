"""Records from the embedded sample, the Hugging Face hub or a local path.

All records are checked before the first is used.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import blocks_of, user_path
from edit_hooks.utils.storage.pinned_file import UrlFile
from edit_hooks.utils.text.readable import readable
from lm_eval_tasks.common.records.cases import OmittedRecord
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.foreign import describe, recognize, refuse_other_formats
from lm_eval_tasks.common.records.layouts import Layout, LayoutReader
from lm_eval_tasks.common.records.published import (
    DEFAULT_REVISION,
    DataFiles,
    HubFile,
    PublishedFile,
    open_published,
    read_records,
)
from lm_eval_tasks.common.records.subsets import choose_subset
from lm_eval_tasks.common.settings import BAD_RECORDS, DATA_REVISION, FULL, Setting, Settings

logger = get_logger("lm_eval.editing_tasks")

RecordT = TypeVar("RecordT")

MINI, HUB = "mini", "hub"
DATA_HINT = (
    "Use data=mini for the embedded sample, data=/path/to/file-or-folder for a copy you have, "
    "or a network connection (or a filled Hugging Face cache) for data=hub."
)
MAX_LISTED = 5  # problems that one error message lists


@dataclass(frozen=True, kw_only=True)
@readable
class Source:
    """Where the records of one benchmark are.

    Attributes:
        title: name of the data set, for messages.
        hub_id: dataset repository on the Hugging Face hub whose file ``files[0]`` is the published one; short for
            ``published=HubFile(repository=hub_id, paths=files[:1])``.
        published: what ``data=hub`` reads, if it is anything else.
        files: accepted file names, the published one first; a folder given as ``data=`` is searched for all of them.
        mini: the embedded sample, if there is one.
        mini_sets: other embedded samples by name, which ``data=mini:<name>`` chooses.
        sets: other published files by name, which ``data=hub:<name>`` chooses: selections of the records, or the same
            ones from elsewhere.
        notes: fields of the layout that the tasks do not use; dotted paths.
        foreign_fields: fields that only records of a layout without a benchmark have -> that layout and what to do, for
            the error. Records of other benchmarks are recognized without it.
        has_nan: whether its files may have NaN, which is no JSON; the parser then decides what it means.
    """

    title: str
    hub_id: str = ""
    published: PublishedFile | None = None
    files: Sequence[str]
    mini: Path | None = None
    mini_sets: Mapping[str, Path] = field(default_factory=dict)
    sets: Mapping[str, PublishedFile] = field(default_factory=dict)
    notes: Sequence[str] = ()
    foreign_fields: Mapping[str, str] = field(default_factory=dict)
    has_nan: bool = False

    @property
    def default_file(self) -> PublishedFile:
        """The file that ``data=hub`` reads."""
        return self.published or HubFile(repository=self.hub_id, paths=self.files[:1])

    @property
    def repository(self) -> str:
        """Repository or address of that file, for messages."""
        file = self.default_file
        return file.url if isinstance(file, UrlFile) else file.repository

    def named_sets(self, origin: str) -> Mapping[str, Path | PublishedFile]:
        """The sets that follow ``mini`` or ``hub`` in the setting ``data``, by name."""
        return self.mini_sets if origin == MINI else self.sets

    def layout(self, parse: Callable[[Fields, int], RecordT], groups: Sequence[str] = ()) -> Layout[RecordT]:
        """The layout of the records, given their parser and the groups of tasks that read them."""
        return Layout(
            title=self.title, groups=groups, parse=parse, notes=self.notes, foreign_fields=self.foreign_fields
        )


@dataclass(frozen=True)
class LoadedRecords(Generic[RecordT]):
    """Checked records, and their origin for the results (JSON-able).

    Attributes:
        all_records: those of the whole file, of which a subset may have been chosen.
    """

    records: list[RecordT]
    source: dict[str, Any]
    all_records: Sequence[RecordT] = ()


@dataclass(frozen=True)
class RawRecords:
    """Unchecked records as they stand in the files.

    Attributes:
        rows: each after its location, for messages.
        paths: the files.
        origin: where they come from, with their ``sha256`` (JSON-able).
    """

    rows: Sequence[tuple[str, Any]]
    paths: Sequence[Path]
    origin: Mapping[str, Any]


@dataclass
class _ParsedFile(Generic[RecordT]):
    """The outcome of parsing a file.

    Attributes:
        records: the usable records.
        rows: their rows in the file.
        problems: location of every other record -> reason.
        unknown_fields: path of a field that the parser did not read -> number of records with it.
        suggestions: that path -> hint about the field that it may be, from the first record with it; "" without one.
        left_out: reason why the release leaves a record out -> number of such records.
    """

    records: list[RecordT] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    unknown_fields: Counter[str] = field(default_factory=Counter)
    suggestions: dict[str, str] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


def read_raw(source: Source, settings: Settings) -> RawRecords:
    """Read the files of a benchmark without a look at their records.

    Args:
        settings: read here are ``data`` and ``data_revision``, as in :func:`load_records`.

    Raises:
        EditingError: for unreachable data (with the remedies) and malformed JSON (with file and line).
    """
    place = _locate(source, choose_data(settings), settings)
    for path in place.paths:
        refuse_other_formats(path)
    rows = read_records(place, f"file of {source.title}", finite=not source.has_nan)
    return RawRecords(rows, place.paths, {**place.origin, "sha256": _digest(place.paths)})


def load_records(
    source: Source,
    settings: Settings,
    layout: Layout[RecordT],
    find_others: Callable[[], Sequence[Layout[object]]] = tuple,
    join: Callable[[Sequence[RecordT]], Sequence[RecordT]] | None = None,
) -> LoadedRecords[RecordT]:
    """Read and check every record of a benchmark.

    Args:
        source: the files of the benchmark.
        settings: a task's metadata. Read here: ``data`` (mini, hub, a set as in hub:set, or a path; see
            :func:`choose_data`), ``data_revision`` (hub revision of the data; ``revision`` is the model's),
            ``bad_records`` (error or skip), ``subset`` and ``subset_seed`` (see
            :mod:`lm_eval_tasks.common.records.subsets`).
        layout: the layout of the benchmark's records.
        find_others: returns those of all benchmarks, whose records are refused.
        join: makes one record of several rows of the file; a record's row is then its position among those.

    Fields that the parser does not read are counted in the result's ``source`` and named in one warning.

    Raises:
        EditingError: for unreachable data (with the remedies), malformed JSON (with file and line) and bad records
            (with file, record number, field and remedy of the first few).
    """
    raw = read_raw(source, settings)
    rows = raw.rows
    shown = ", ".join(map(str, raw.paths))
    parsed = _parse_all(rows, shown, LayoutReader(layout, find_others).read, BAD_RECORDS.read(settings))
    num_rows = len(parsed.records)
    if join is not None:
        parsed.records = list(join(parsed.records))
        parsed.rows = list(range(len(parsed.records)))
    chosen, subset = choose_subset(parsed.rows, settings, f"{source.title} (data={raw.origin['data']})")
    origin = {**raw.origin, "records": len(chosen), **subset}
    if join is not None:
        origin["rows"] = num_rows
    if skipped := parsed.problems:
        logger.warning("%s: %d of %d records skipped, see data_source in the results", shown, len(skipped), len(rows))
        origin["skipped"] = skipped
    if parsed.left_out:
        origin["left_out"] = dict(sorted(parsed.left_out.items()))
    if parsed.unknown_fields:
        origin["unknown_fields"] = dict(sorted(parsed.unknown_fields.items()))
        listed = [f"{name} ({count} records)" for name, count in origin["unknown_fields"].items()]
        hints = "".join(f" {name}:{hint}" for name, hint in sorted(parsed.suggestions.items()) if hint)
        _warn_of_unknown_fields(shown, source.title, f"{', '.join(listed)}.{hints}")
    return LoadedRecords([parsed.records[position] for position in chosen], origin, parsed.records)


def _digest(paths: Sequence[Path]) -> str:
    """Hexadecimal SHA-256 of the files' content, one after another."""
    digest = hashlib.sha256()
    for path in paths:
        for block in blocks_of(path):
            digest.update(block)
    return digest.hexdigest()


@functools.cache
def _warn_of_unknown_fields(path: str, title: str, listed: str) -> None:
    """Log once per process; every task of a group loads the file."""
    logger.warning("%s: fields that %s does not use are ignored: %s", path, title, listed)


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


def with_set(settings: Settings, setting: Setting[str | None], source: Source) -> Settings:
    """The settings with ``data`` as the set setting has it.

    Raises:
        EditingError: for an unknown set, and for ``data`` that chooses anything else.
    """
    chosen = setting.read(settings) if source.sets else None
    if chosen is None:
        return settings
    data = HUB if chosen == FULL else f"{HUB}:{chosen}"
    if (given := settings.get("data")) not in (None, HUB, data):
        raise EditingError(f"{setting.name}={chosen} means data={data}, but data={given} is given; drop one of them.")
    return {**settings, "data": data}


def _locate(source: Source, data: str, settings: Settings) -> DataFiles:
    """The files to read and the start of their description."""
    if data == MINI and source.mini is None:
        raise EditingError(
            f"{source.title} has no embedded sample. Use data=hub or data=/path, with a file like {source.files[0]} of "
            f"{source.repository}."
        )
    if data == MINI and source.mini:
        return DataFiles([source.mini], {"data": MINI, "file": source.mini.name})
    if data == HUB:
        return _open(source.default_file, data, settings)
    if chosen := named_set(data):
        return _open(_find_set(source, data, *chosen), data, settings)
    path = _search(source, user_path(data, "data"))
    return DataFiles([path], {"data": data, "file": path.name})


def _find_set(source: Source, data: str, origin: str, name: str) -> Path | PublishedFile:
    """The file of another embedded sample, or of another published set."""
    sets = source.named_sets(origin)
    if name not in sets:
        accepted = ", ".join([origin, *(f"{origin}:{known}" for known in sets)])
        raise EditingError(
            f"data={data}: {source.title} has no set {name!r}.{near_misses(name, sets)} Accepted: {accepted}."
        )
    return sets[name]


def _open(file: Path | PublishedFile, data: str, settings: Settings) -> DataFiles:
    """An embedded file, or a published one."""
    revision = DATA_REVISION.read(settings)
    if not isinstance(file, Path):
        return open_published(file, data, revision, DATA_HINT)
    if revision not in (None, DEFAULT_REVISION):
        raise EditingError(f"data_revision={revision!r} has no meaning for data={data}, a fixed file; drop it.")
    return DataFiles([file], {"data": data, "file": file.name})


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
    rows: Sequence[tuple[str, Any]], shown: str, parse: Callable[[Fields, int], RecordT], bad_records: str
) -> _ParsedFile[RecordT]:
    """Parse all rows of the files ``shown``; ``bad_records=skip`` leaves the bad ones out."""
    parsed: _ParsedFile[RecordT] = _ParsedFile()
    for row, (where, record) in enumerate(rows):
        try:
            if not isinstance(record, Mapping):
                raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
            fields = Fields(record, where)
            parsed_record = parse(fields, row)
            unread = fields.unread()
            fields.check_spelling(unread)
            parsed.unknown_fields.update(unread)
            parsed.suggestions |= {path: fields.suggestion(path) for path in unread if path not in parsed.suggestions}
            parsed.records.append(parsed_record)
            parsed.rows.append(row)
        except OmittedRecord as reason:
            parsed.left_out[str(reason)] += 1
        except EditingError as error:
            parsed.problems[where] = str(error)
    if parsed.problems and (bad_records == "error" or not parsed.records):
        if not parsed.records and (layout := recognize(rows[0][1])):
            raise EditingError(describe(layout, shown))
        raise EditingError(_unusable(parsed, shown, len(rows)))
    if parsed.left_out and not parsed.records:
        raise EditingError(f"{shown}: the benchmark leaves out all {len(rows)} records: {', '.join(parsed.left_out)}.")
    return parsed


def _unusable(parsed: _ParsedFile[Any], shown: str, num_rows: int) -> str:
    """The message about bad records: each reason once, at the first record that has it."""
    first: dict[str, str] = {}
    count = Counter[str]()
    for where, problem in parsed.problems.items():
        reason = problem.removeprefix(where)
        first.setdefault(reason, problem)
        count[reason] += 1
    listed = [
        f"{problem} ({count[reason] - 1} more like it)" if count[reason] > 1 else problem
        for reason, problem in list(first.items())[:MAX_LISTED]
    ]
    more = [f"... and {len(first) - MAX_LISTED} further reasons"] if len(first) > MAX_LISTED else []
    skip = "Fix them, or leave them out with bad_records=skip (lm-edit: --bad-records skip); the results count them."
    start = f"{shown}: {len(parsed.problems)} of {num_rows} records cannot be used:"
    return "\n".join([start, *listed, *more, *([skip] if parsed.records else [])])
