"""Facts for ``build-bake`` from results of the Wikidata Query Service.

A result has the columns ``s``, ``sLabel``, ``o`` and ``oLabel``: the items of a relation and their labels. It is read
from JSON, as the service returns it or as its web page saves it, or from CSV. Records are made of names, so a row whose
names do not stand for one subject and one object is ambiguous. Nothing is downloaded here.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.files import read_text, sha256_of, user_path
from edit_hooks.utils.storage.json_io import parse_json
from lm_edit.builders.facts import Fact

COLUMNS = ("s", "sLabel", "o", "oLabel")

# Reasons for which a row is ambiguous
NO_ITEM = "subject or object is no item, but a value or unknown"
NO_LABEL = "an item has no label: it is empty or the item's own id"
SEVERAL_LABELS = "an item has several labels"
SHARED_LABEL = "several items have the same label"
SEVERAL_OBJECTS = "the subject has several objects"

_ITEM = re.compile(r"(?:.*[/:])?(Q\d+)")
_ID = re.compile(r"[QPL]\d+")
MAX_NAMED = 3  # rows that an error names for one reason


class RelationFile(NamedTuple):
    """A result of the service: the facts of one relation, and the relation's name in words, if it has one.

    Attributes:
        is_swapped: the relation is the inverse of the file's: the columns of subject and object change places.
    """

    relation: str
    label: str
    path: Path
    is_swapped: bool = False


class WikidataRow(NamedTuple):
    """A row of a result.

    Attributes:
        where: file and number, for messages.
        subject, object: ids of the items; "" for other values.
    """

    where: str
    relation: str
    subject: str
    subject_label: str
    object: str
    object_label: str

    @property
    def names(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The items, each with its label."""
        return (self.subject, self.subject_label), (self.object, self.object_label)


@dataclass
class WikidataFacts:
    """Facts, and the rows that are not facts.

    Attributes:
        facts: in the order of the files, each once.
        ambiguous: (row, reason).
        num_repeated: rows that repeat an earlier one.
        items: the ids of subject and object of all rows where both are items, each pair once. Ambiguous rows are among
            them: without these, no subject would have several objects.
    """

    facts: list[Fact] = field(default_factory=list)
    ambiguous: list[tuple[WikidataRow, str]] = field(default_factory=list)
    num_repeated: int = 0
    items: list[Fact] = field(default_factory=list)


def swap(files: Sequence[RelationFile], names: Iterable[str]) -> list[RelationFile]:
    """The files, with those of the named relations swapped.

    Raises:
        EditingError: for a name that no file has.
    """
    swapped, known = set(names), [file.relation for file in files]
    for name in sorted(swapped - set(known)):
        raise EditingError(f"--swap {name}: no file is given for this relation.{near_misses(name, known)}")
    return [file._replace(is_swapped=file.relation in swapped) for file in files]


def parse_relation_file(text: str) -> RelationFile:
    """The relation, label and file in ``NAME:LABEL=FILE`` or ``NAME=FILE``.

    Raises:
        EditingError: for other texts.
    """
    named, separator, file = text.partition("=")
    name, colon, label = (part.strip() for part in named.partition(":"))
    if not separator or not name or not file.strip() or (colon and not label):
        raise EditingError(f"{text!r} names no relation and file; write NAME:LABEL=FILE, as in P36:capital=P36.json.")
    return RelationFile(name, label, user_path(file, "query result"))


def convert(
    files: Sequence[RelationFile], *, several_objects: bool = False, skip_ambiguous: bool = False
) -> WikidataFacts:
    """The facts of some results.

    Args:
        several_objects: accept subjects with several objects, as relations of one to many have.
        skip_ambiguous: leave ambiguous rows out, with a reason; otherwise they are an error.

    Raises:
        EditingError: for files that cannot be read or have other columns, a relation that is given twice, ambiguous
            rows, and no facts at all.
    """
    if twice := [name for name, count in Counter(file.relation for file in files).items() if count > 1]:
        raise EditingError(f"relation {twice[0]!r} is given twice; join its files.")
    rows = [row for file in files for row in _read(file)]
    converted = WikidataFacts(ambiguous=list(_ambiguous(rows, several_objects)))
    if converted.ambiguous and not skip_ambiguous:
        raise EditingError(_message(converted.ambiguous))
    skipped = {(row.relation, row.where) for row, _ in converted.ambiguous}
    facts: dict[Fact, None] = {}
    for row in rows:
        fact = Fact(row.subject_label, row.relation, row.object_label)
        if (row.relation, row.where) in skipped:
            continue
        converted.num_repeated += fact in facts
        facts[fact] = None
    if not facts:
        raise EditingError("the results have no unambiguous row; nothing is left to make facts of.")
    converted.facts = list(facts)
    linked = (Fact(row.subject, row.relation, row.object) for row in rows if row.subject and row.object)
    converted.items = list(dict.fromkeys(linked))
    return converted


def content(files: Sequence[RelationFile], converted: WikidataFacts) -> dict[str, Any]:
    """The content of the file of facts; its relations have no templates yet."""
    counts = Counter(reason for _, reason in converted.ambiguous)
    swapped = [file.relation for file in files if file.is_swapped]
    return {
        "relations": {file.relation: {"label": file.label} if file.label else {} for file in files},
        "facts": [list(fact) for fact in converted.facts],
        "provenance": {
            "builder": "lm-edit bake-facts",
            "sha256": {file.relation: sha256_of(file.path) for file in files},
            **({"swapped": swapped} if swapped else {}),
            "left_out": dict(counts.most_common()),
        },
    }


def _message(ambiguous: Sequence[tuple[WikidataRow, str]]) -> str:
    by_reason: dict[str, list[WikidataRow]] = defaultdict(list)
    for row, reason in ambiguous:
        by_reason[reason].append(row)
    lines = []
    for reason, rows in by_reason.items():
        named = [f"{row.where}: {row.subject_label!r}, {row.object_label!r}" for row in rows[:MAX_NAMED]]
        more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
        lines.append(f"{reason} ({len(rows)}): {'; '.join(named)}{more}.")
    return (
        f"{len(ambiguous)} rows are ambiguous. "
        + "\n".join(lines)
        + "\nChange the query or the file, leave such rows out (--skip-ambiguous), or accept subjects with several "
        "objects (--several-objects)."
    )


def _ambiguous(rows: Sequence[WikidataRow], several_objects: bool) -> Iterator[tuple[WikidataRow, str]]:
    """The ambiguous rows, each with its first reason."""
    labels: dict[str, set[str]] = defaultdict(set)
    items: dict[str, set[str]] = defaultdict(set)
    objects: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        for item, label in row.names:
            if item and _is_label(label):
                labels[item].add(label)
                items[label].add(item)
        objects[row.relation, row.subject].add(row.object)
    for row in rows:
        if not (row.subject and row.object):
            yield row, NO_ITEM
        elif not all(_is_label(label) for _, label in row.names):
            yield row, NO_LABEL
        elif any(len(labels[item]) > 1 for item, _ in row.names):
            yield row, SEVERAL_LABELS
        elif any(len(items[label]) > 1 for _, label in row.names):
            yield row, SHARED_LABEL
        elif not several_objects and len(objects[row.relation, row.subject]) > 1:
            yield row, SEVERAL_OBJECTS


def _is_label(text: str) -> bool:
    return bool(text) and not _ID.fullmatch(text)


def _read(file: RelationFile) -> Iterator[WikidataRow]:
    rows = list(_csv_rows(file.path) if file.path.suffix.lower() == ".csv" else _json_rows(file.path))
    if not rows:
        raise EditingError(f"{file.path} has no rows.")
    s, o = ("o", "s") if file.is_swapped else ("s", "o")
    for where, values in rows:
        subject, object = (found[1] if (found := _ITEM.fullmatch(values[name])) else "" for name in (s, o))
        yield WikidataRow(where, file.relation, subject, values[f"{s}Label"], object, values[f"{o}Label"])


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    reader = csv.DictReader(io.StringIO(read_text(path, "query result")), strict=True)
    try:
        _check_columns(path, reader.fieldnames or ())
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise EditingError(f"{path}, row {number}: it has not as many cells as the header.")
            yield f"{path.name}, row {number}", {name: row[name].strip() for name in COLUMNS}
    except csv.Error as error:
        raise EditingError(f"{path}: not valid CSV ({error}). Download it again.") from None


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of the service's own JSON (``results.bindings``), or of the list that its web page saves."""
    found = parse_json(read_text(path, "query result"), str(path))
    if isinstance(found, Mapping):
        results = found.get("results")
        found = results.get("bindings") if isinstance(results, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(row, Mapping) for row in found):
        raise EditingError(f"{path} is no query result: a list of rows or an object with results.bindings is needed.")
    for number, row in enumerate(found):
        where = f"{path.name}, row {number}"
        _check_columns(Path(f"{path}, row {number},"), row)
        cells = {name: row[name] for name in COLUMNS}
        values = {name: cell.get("value") if isinstance(cell, Mapping) else cell for name, cell in cells.items()}
        if odd := [name for name, value in values.items() if not isinstance(value, str)]:
            raise EditingError(f"{path}, row {number}: {odd[0]} is {values[odd[0]]!r}; a text is needed.")
        yield where, {name: str(value).strip() for name, value in values.items()}


def _check_columns(where: Path, columns: Iterable[str]) -> None:
    if missing := [name for name in COLUMNS if name not in columns]:
        raise EditingError(
            f"{where} has no column {missing[0]!r}; {', '.join(COLUMNS)} are needed: SELECT ?s ?sLabel ?o ?oLabel, "
            "with the label service."
        )
