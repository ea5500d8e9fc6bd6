"""Typed access to the fields of a record, and the fields that a parser did not read.

Errors name file, record, field and remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.prompt_context import content_of
from edit_hooks.utils.errors import EditingError, near_misses
from lm_eval_tasks.common.records.synonyms import similar

MAX_LISTED = 6  # fields of a record that one message lists


class Fields:
    """The fields of one record.

    Every access is recorded, so that :meth:`unread` lists the fields of which a parser has no use without a second list
    of the known ones.

    Args:
        record: the record as read from JSON.
        where: file, record number and line, for error messages.

        accessed: dotted paths of the accessed fields; the objects of a list share it, and one path, ``name[]``.
        lacking: dotted paths of required fields that the record lacks; shared likewise.
        prefix: path of this record in the outermost one.
        declared: dotted paths that the parser reads later; no hint names them in place of a missing field.

    All methods raise EditingError for a field of the wrong type.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        where: str,
        accessed: set[str] | None = None,
        lacking: set[str] | None = None,
        prefix: str = "",
        declared: frozenset[str] = frozenset(),
    ) -> None:
        self.record = record
        self.where = where
        self.accessed: set[str] = set() if accessed is None else accessed
        self.lacking: set[str] = set() if lacking is None else lacking
        self.prefix = prefix
        self.declared = declared

    def has(self, path: str) -> bool:
        """Whether there is a field at a dotted path, for parsers of several layouts; this is no reading access."""
        *steps, last = path.split(".")
        value: Any = self.record
        for step in steps:
            value = value.get(step) if isinstance(value, Mapping) else None
        return isinstance(value, Mapping) and last in value

    def require(self, path: str) -> None:
        """Refuse a record without a field, whatever its value."""
        self._get(path)

    def text(self, path: str) -> str:
        """The non-empty string at a dotted path, without the spaces around it; line breaks and indentation are kept.

        A missing field is an error.
        """
        value = self._get(path)
        if not isinstance(value, str):
            raise self.error(path, f"is {_shorten(value)}; a text is needed")
        if not value.strip():
            raise self.error(path, "is empty; give a text or drop the record")
        return content_of(value)

    def text_or_empty(self, path: str) -> str:
        """The string at a dotted path as in :meth:`text`, which may be empty.

        A missing field is an error.
        """
        value = self.optional(path)
        return "" if isinstance(value, str) and not value.strip() else self.text(path)

    def text_or_none(self, path: str) -> str | None:
        """The string at a dotted path as in :meth:`text`; ``None`` if it is absent, null or blank."""
        value, (parent, _, _) = self.optional(path), path.rpartition(".")
        if parent and not isinstance(outer := self._peek(parent), Mapping | None):
            raise self.error(parent, f"is {_shorten(outer)}; an object is needed")
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return self.text(path)

    def one_or_more(self, name: str, *, required: bool = False) -> list[str]:
        """The non-empty strings of a field that holds one of them or a list.

        None if the field is absent, null or blank, which is an error if it is required.
        """
        value = self.optional(name)
        if not isinstance(value, list) or (required and not value):
            text = self.text(name) if required else self.text_or_none(name)
            return [] if text is None else [text]
        texts = self.texts(name)
        for number, text in enumerate(texts):
            if not text.strip():
                raise self.error(f"{name}[{number}]", "is empty; give a text or drop the entry")
        return texts

    def pairs(self, prompts: str, answers: str) -> list[tuple[str, str]]:
        """The prompts of one field with their answers in another; each field is a text or a list of texts."""
        asked, wanted = self.one_or_more(prompts), self.one_or_more(answers)
        if len(asked) != len(wanted):
            problem = f"has {len(wanted)} answers for {len(asked)} of {prompts!r}; one for each is needed"
            raise self.error(answers, problem)
        return list(zip(asked, wanted, strict=True))

    def old_answer(self, path: str, neighbors: str) -> str | None:
        """The answer before the edit, which the prompts in the field ``neighbors`` share; new events have none."""
        answer = self.text_or_none(path)
        if answer is None and any(self.texts(neighbors)):
            raise self.error(path, f"is missing, and it is the answer of {neighbors!r}; add it, or drop those prompts")
        return answer

    def texts(self, name: str, *, required: bool = False) -> list[str]:
        """A list of strings as in :meth:`text`; empty if the field is absent, an error if it is required."""
        value = self._get(name) if required else self.optional(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(name, f"is {_shorten(value)}; a list of texts is needed")
        for number, item in enumerate(value):
            if not isinstance(item, str):
                raise self.error(f"{name}[{number}]", f"is {_shorten(item)}; a list of texts is needed")
        return [content_of(item) for item in value]

    def objects(self, name: str, *, required: bool = True) -> list[Fields]:
        """The fields of each object in a list; a missing or empty list is an error if it is required."""
        value = self._get(name, whole=False) if required else self._peek(name)
        if not required and value in (None, []):
            self.accessed.add(self.prefix + name)
            return []
        if not isinstance(value, list) or not value:
            raise self.error(name, f"is {_shorten(value)}; a non-empty list of objects is needed")
        for number, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self.error(f"{name}[{number}]", f"is {_shorten(item)}; a list of objects is needed")
        prefix = f"{self.prefix}{name}[]."
        return [
            Fields(item, f"{self.where}, {name}[{number}]", self.accessed, self.lacking, prefix, self.declared)
            for number, item in enumerate(value)
        ]

    def optional(self, path: str) -> Any:
        """The value at a dotted path; ``None`` if it is absent."""
        self.accessed.add(self.prefix + path)
        return self._peek(path)

    def _peek(self, path: str) -> Any:
        """As :meth:`optional`, but no access."""
        value: Any = self.record
        for step in path.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return value

    def unread(self) -> list[str]:
        """Dotted paths of the record's fields that no other method has read.

        A field of which nothing was read is listed without the fields inside of it.
        """
        unread = self.unread_paths()
        return sorted(path for path in unread if path.rpartition(".")[0].removesuffix("[]") not in unread)

    def unread_paths(self) -> frozenset[str]:
        """As :meth:`unread`, with all fields inside of those."""
        around = {outer for path in self.accessed for outer in _with_parents(path)}
        return frozenset(
            path for path in self.paths if path not in around and self.accessed.isdisjoint(_with_parents(path))
        )

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        """Dotted paths of all fields of the record; ``name[].field`` for those of a list of objects."""
        return frozenset(_paths(self.record))

    def check_spelling(self, unread: Sequence[str]) -> None:
        """Refuse an unread field whose name is almost that of an optional field which the record lacks."""
        absent = self.accessed - self.paths if unread else set()
        for path in unread:
            if hint := near_misses(path, absent, cutoff=0.9):
                raise self.error(path, f"is not known.{hint} Rename it")

    def suggestion(self, unread: str) -> str:
        """A hint about a field that the parser ignores: an absent one of its own that is called or means the same."""
        return similar(unread, sorted(self.accessed - self.paths))

    def _get(self, path: str, whole: bool = True) -> Any:
        """A required value; ``whole`` unless its own fields are read one by one."""
        if whole:
            self.accessed.add(self.prefix + path)
        value, around = self.record, self.prefix
        for step in path.split("."):
            if not isinstance(value, Mapping) or step not in value:
                self.lacking.add(self.prefix + path)
                read = {outer for known in (*self.accessed, *self.declared) for outer in _with_parents(known)}
                unread = [key for key in value if f"{around}{key}" not in read] if isinstance(value, Mapping) else []
                hint = similar(step, unread) or _listed(unread)
                raise self.error(path, f"is missing.{hint} Add it, or check that the file fits")
            value, around = value[step], f"{around}{step}."
        return value

    def error(self, path: str, problem: str) -> EditingError:
        """An error about a field, for parsers: ``problem`` is a predicate without a final period."""
        return EditingError(f"{self.where}: field {path!r} {problem}.")


def source_id(fields: Fields, name: str, row: int) -> str:
    """The id of a record in its file, by default the row's number.

    Raises:
        EditingError: for an id that is neither a text nor a whole number.
    """
    value = fields.optional(name)
    if value is None:
        return str(row)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise fields.error(name, f"is {_shorten(value)}; a text or a whole number is needed")
    return str(value)


@functools.lru_cache(maxsize=4096)  # the records of a file have the same paths
def _with_parents(path: str) -> tuple[str, ...]:
    """A dotted path and those of the fields that contain it."""
    paths = []
    while path:
        paths.append(path)
        path = path[:-2] if path.endswith("[]") else path.rpartition(".")[0]
    return tuple(paths)


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields inside of a value, with repetitions."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield f"{prefix}{name}"
            if not isinstance(item, str):  # most are
                yield from _paths(item, f"{prefix}{name}.")
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, str):
                yield from _paths(item, f"{prefix.removesuffix('.')}[].")


def _listed(names: Sequence[str]) -> str:
    """The fields that nothing reads, as a sentence; "" without any."""
    more = ", ..." if len(names) > MAX_LISTED else ""
    return f" The record has {', '.join(map(repr, names[:MAX_LISTED]))}{more}." if names else ""


def _shorten(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
