"""Facts in files of the builders: named relations, and triples of subject, relation and object."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from edit_hooks.utils.errors import near_misses
from lm_eval_tasks.common.records.fields import Fields


class Fact(NamedTuple):
    """A triple: the edge from ``subject`` to ``object`` in a knowledge graph."""

    subject: str
    relation: str
    object: str


class Names(Container[str], Iterable[str], Protocol):
    """The known relations."""


def entry_names(fields: Fields, name: str) -> list[str]:
    """The keys of an object of named entries.

    Raises:
        EditingError: for anything but an object with entries.
    """
    value = fields.record.get(name)
    if not isinstance(value, Mapping) or not value:
        raise fields.error(name, "must be an object of named entries")
    return list(value)


def read_facts(fields: Fields, name: str, relations: Names | None = None) -> Iterator[Fact]:
    """The triples of a list with entries ``[subject, relation, object]``.

    Args:
        relations: the known ones; by default any text is one.

    Raises:
        EditingError: for anything but such a list, and for an unknown relation.
    """
    rows = fields.record.get(name)
    if not isinstance(rows, list) or not rows:
        raise fields.error(name, "must be a list with entries [subject, relation, object]")
    for number, row in enumerate(rows):
        texts = [part.strip() for part in row if isinstance(part, str)] if isinstance(row, list) else []
        if len(texts) != 3 or len(row) != 3 or not all(texts):
            raise fields.error(f"{name}[{number}]", f"is {row!r}; three texts are needed")
        if relations is not None and texts[1] not in relations:
            raise fields.error(f"{name}[{number}]", f"has the relation {texts[1]!r}.{near_misses(texts[1], relations)}")
        yield Fact(*texts)
