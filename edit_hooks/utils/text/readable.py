"""Short texts of values for terminals and notebooks: tensors by shape, long texts and lists by their beginning.

A dataclass prints all of its fields, and so the tensors of an edit or the samples of a run. :func:`readable` gives a
class a line of bounded length for ``repr``, and a small table for notebooks. Both may show text of foreign files: the
line has no character that a terminal interprets, and the table is escaped.
"""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, TypeVar

from edit_hooks.utils.printable import printable

MAX_LINE = 300  # characters of a repr
MAX_VALUE = 80  # characters of one value in it
MAX_CELL = 400  # characters of one value in a notebook's table
MAX_ROWS = 30
MAX_DEPTH = 2
_SHOWN_ENTRIES = 4  # of a collection
_DOTS = "..."

ClassT = TypeVar("ClassT", bound=type)


def readable(cls: ClassT) -> ClassT:
    """Give a class a short ``repr``, and a table in notebooks; stands below ``@dataclass``.

    A class chooses what is shown with ``_summary()``, an iterable of (name, value). Without it, the fields of a
    dataclass or named tuple are shown that differ from their defaults.
    """
    for name, method in (("__repr__", _line), ("_repr_html_", _table)):
        setattr(cls, name, method)
    return cls


def shown(value: object, limit: int = MAX_VALUE, depth: int = 0) -> str:
    """One line about a value, at most ``limit`` characters; collections inside of ``MAX_DEPTH`` others are counted."""
    return _one_line(_text(value, limit, depth), limit)


def _line(self: object) -> str:
    """The class and what its summary has, on one line."""
    parts = (f"{_one_line(name, MAX_VALUE)}={shown(value)}" for name, value in _summary_of(self))
    return f"{type(self).__name__}({_cut(', '.join(parts), MAX_LINE - len(type(self).__name__) - 2)})"


def _table(self: object) -> str:
    """The same as an HTML table, with longer values."""
    rows = list(islice(_summary_of(self), MAX_ROWS))
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(_one_line(name, MAX_VALUE))}</th>'
        f'<td style="text-align:left">{html.escape(_cell(value))}</td></tr>'
        for name, value in rows
    )
    return f"<table><caption><b>{html.escape(type(self).__name__)}</b></caption>{cells}</table>"


def _cell(value: object) -> str:
    """A text as it is, without quotes."""
    return _one_line(value, MAX_CELL) if isinstance(value, str) else shown(value, MAX_CELL)


def _summary_of(value: Any) -> Iterable[tuple[str, object]]:
    own = getattr(value, "_summary", None)
    return own() if own is not None else _changed_fields(value)


def _changed_fields(value: Any) -> list[tuple[str, object]]:
    """The fields that differ from their defaults; those declared with ``repr=False`` are left out."""
    if not dataclasses.is_dataclass(value):
        defaults = value._field_defaults
        found = [(name, getattr(value, name), defaults.get(name, dataclasses.MISSING)) for name in value._fields]
    else:
        found = [
            (field.name, getattr(value, field.name, None), _default(field))
            for field in dataclasses.fields(value)
            if field.repr
        ]
    return [(name, entry) for name, entry, default in found if not _is(entry, default)]


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is(entry: object, default: object) -> bool:
    """Whether a value is its default; a tensor never is."""
    return entry is default or (type(entry) is type(default) and not hasattr(entry, "dtype") and entry == default)


def _text(value: object, limit: int, depth: int) -> str:
    if isinstance(value, str):
        return repr(value[: limit + 1])
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if getattr(type(value), "__repr__", None) is _line:
        return _cut(repr(value), limit)
    if isinstance(value, (Mapping, Sequence, Set)) and not isinstance(value, (bytes, bytearray, memoryview)):
        return _collection(value, limit, depth)
    if callable(value) and (name := getattr(value, "__qualname__", None)):
        return str(name)
    return f"<{type(value).__name__}>"


def _collection(value: Mapping[Any, Any] | Sequence[Any] | Set[Any], limit: int, depth: int) -> str:
    start, end = "{}" if isinstance(value, Mapping) else "[]"
    if depth >= MAX_DEPTH and value:
        return f"{start}{_DOTS} {len(value)} in all{end}"
    if isinstance(value, Mapping):
        pairs = islice(value.items(), _SHOWN_ENTRIES)
        entries = [f"{_bare(key)}: {shown(entry, limit // 2, depth + 1)}" for key, entry in pairs]
    else:
        entries = [shown(entry, limit, depth + 1) for entry in islice(value, _SHOWN_ENTRIES)]
    return start + _joined(entries, len(value), limit) + end


def _bare(key: object) -> str:
    return _one_line(key, MAX_VALUE) if isinstance(key, str) else shown(key, depth=MAX_DEPTH)


def _joined(entries: list[str], count: int, limit: int) -> str:
    """As many entries as fit, and how many there are if some are missing."""
    room = limit - len(f", {_DOTS} {count} in all") - 2
    kept: list[str] = []
    for entry in entries:
        if kept and len(", ".join([*kept, entry])) > room:
            break
        kept.append(_cut(entry, room))
    return ", ".join([*kept, f"{_DOTS} {count} in all"] if len(kept) < count else kept)


def _one_line(text: str, limit: int) -> str:
    return _cut(printable(text[: limit + 1]).replace("\n", " "), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - len(_DOTS), 0)] + _DOTS
