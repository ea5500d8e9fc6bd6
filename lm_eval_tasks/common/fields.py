"""Typed access to the fields of a record.

Errors name file, record, field and remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses


class Fields:
    """The fields of one record.

    Args:
        record: the record as read from JSON.
        where: file, record number and line, for error messages.

    All methods raise EditingError for a field of the wrong type.
    """

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where

    def text(self, path: str) -> str:
        """The non-empty string at a dotted path, without outer white space.

        A missing field is an error.
        """
        value = self._get(path)
        if not isinstance(value, str):
            raise self._error(path, f"is {_shorten(value)}; a text is needed")
        if not value.strip():
            raise self._error(path, "is empty; give a text or drop the record")
        return value.strip()

    def texts(self, name: str) -> list[str]:
        """A list of strings without outer white space; empty if the field is absent."""
        value = self.record.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(name, f"is {_shorten(value)}; a list of texts is needed")
        return [item.strip() for item in value]

    def objects(self, name: str) -> list[Fields]:
        """The fields of each object in a non-empty list; a missing list is an error."""
        value = self._get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise self._error(name, f"is {_shorten(value)}; a non-empty list of objects is needed")
        return [Fields(item, f"{self.where}, {name}[{number}]") for number, item in enumerate(value)]

    def _get(self, path: str) -> Any:
        value: Any = self.record
        for step in path.split("."):
            if not isinstance(value, Mapping) or step not in value:
                known = value if isinstance(value, Mapping) else ()
                raise self._error(path, f"is missing.{near_misses(step, known)} Add it, or check that the file fits")
            value = value[step]
        return value

    def _error(self, path: str, problem: str) -> EditingError:
        return EditingError(f"{self.where}: field {path!r} {problem}.")


def _shorten(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
