"""The benchmark that a record belongs to.

A parser is the declaration of its layout: the fields that it reads are those of the layout. A record belongs to another
benchmark if that one's parser accepts it and reads more of its fields, so that the first benchmark would score it
without some of its content, and often against another gold answer. Notes of that layout do not count: any record may
have a field ``relation``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.cases import OmittedRecord
from lm_eval_tasks.common.records.fields import Fields

RecordT = TypeVar("RecordT")

MAX_NAMED = 4  # fields that one message names


@dataclass(frozen=True, kw_only=True)
class Layout(Generic[RecordT]):
    """The records of one benchmark.

    Attributes:
        title: name of the data set, for messages.
        groups: names of the groups or tasks that read the records, for messages.
        parse: (fields of a record, row number from 0) -> record; raises EditingError if the record violates the schema.
        notes: fields of the layout that the benchmark does not use.
        foreign_fields: fields that only records of a layout without a benchmark have -> that layout and what to do.
    """

    title: str
    groups: Sequence[str] = ()
    parse: Callable[[Fields, int], RecordT]
    notes: Sequence[str] = ()
    foreign_fields: Mapping[str, str] = field(default_factory=dict)

    def read(self, fields: Fields, row: int) -> RecordT:
        """Parse a record.

        Raises:
            EditingError: for a record that violates the schema, or has a foreign field.
        """
        for name in self.notes:
            fields.optional(name)
        return self.read_used(fields, row)

    def read_used(self, fields: Fields, row: int) -> RecordT:
        """As :meth:`read`, without access to the notes, which any record may have."""
        for name, remedy in self.foreign_fields.items():
            if fields.has(name):
                raise EditingError(f"{fields.where}: field {name!r} does not belong to {self.title}: {remedy}")
        return self.parse(fields, row)


class LayoutReader(Generic[RecordT]):
    """Reads records of one benchmark and recognizes those of others.

    Args:
        layout: that of the benchmark.
        find_others: returns the layouts of all benchmarks; called for the first record that does not fit entirely.
    """

    def __init__(self, layout: Layout[RecordT], find_others: Callable[[], Sequence[Layout[object]]]) -> None:
        self.layout = layout
        self.find_others = functools.cache(find_others)
        # (layout, fields of a record, unread ones): the layout lacks a field or does not read more, whatever the values
        self.excluded: set[tuple[str, frozenset[str], frozenset[str]]] = set()

    def read(self, fields: Fields, row: int) -> RecordT:
        """Parse a record.

        Raises:
            EditingError: as :meth:`Layout.read`, and for a record of another benchmark, with its name.
        """
        try:
            record = self.layout.read(fields, row)
        except OmittedRecord:
            raise
        except EditingError:
            if owners := self._owners(fields, row, accepted=False):
                raise self._misplaced(fields, owners) from None
            if fields.lacking:  # the same error, with a hint that names no field of the layout
                declared = frozenset({*read_on(self.layout, fields, row).accessed, *self.layout.notes})
                self.layout.read(Fields(fields.record, fields.where, declared=declared), row)
            raise
        if (unread := fields.unread()) and (owners := self._owners(fields, row, accepted=True)):
            listed = ", ".join(map(repr, unread[:MAX_NAMED])) + (", ..." if len(unread) > MAX_NAMED else "")
            raise self._misplaced(fields, owners, f", which has no field {listed}")
        return record

    def _misplaced(self, fields: Fields, owners: Sequence[Layout[object]], why: str = "") -> EditingError:
        titles = " or ".join(owner.title for owner in owners)
        groups = ", ".join(group for owner in owners for group in owner.groups)
        return EditingError(
            f"{fields.where}: it is a record of {titles}, not of {self.layout.title}{why}. Use the tasks of {groups}."
        )

    def _owners(self, fields: Fields, row: int, *, accepted: bool) -> list[Layout[object]]:
        """The layouts that read most of the record; none if no other one reads more than this one."""
        unread, paths = fields.unread_paths(), fields.paths
        # A record that lacks a required field is not of this layout, so that another one need not read more.
        as_much = not accepted and bool(fields.lacking)
        owners: dict[int, list[Layout[object]]] = {}
        for other in self.find_others():
            key = (other.title, paths, unread)
            if other.title == self.layout.title or key in self.excluded:
                continue
            attempt = Fields(fields.record, fields.where)
            if accepts(other, attempt, row, with_notes=not accepted):
                left = attempt.unread_paths()
                if left < unread or (as_much and left == unread < paths):
                    owners.setdefault(len(left), []).append(other)
                else:
                    self.excluded.add(key)
            elif attempt.lacking:
                self.excluded.add(key)
        return owners[min(owners)] if owners else []


def read_on(layout: Layout[Any], fields: Fields, row: int) -> Fields:
    """A record with a text in every missing field that the parser needs, read as far as the parser goes."""
    record, added = copy.deepcopy(dict(fields.record)), set[str]()
    while True:
        attempt = Fields(record, fields.where)
        if accepts(layout, attempt, row) or not (missing := attempt.lacking - added):
            return attempt
        added |= missing
        for path in missing:
            _add_text(record, path)


def _add_text(record: dict[str, Any], path: str) -> None:
    """Put a text at a dotted path, unless that is in a list or another value is in the way."""
    *steps, last = path.split(".")
    inner: Any = record
    for step in steps:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner[last] = "text"


def accepts(layout: Layout[Any], fields: Fields, row: int, *, with_notes: bool = False) -> bool:
    """Whether a layout's parser accepts a record, whose accessed fields are recorded."""
    try:
        (layout.read if with_notes else layout.read_used)(fields, row)
    except Exception:  # a parser of another package meets records that it never expected
        return False
    return True
