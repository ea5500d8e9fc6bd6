"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses


class Fields:
    """Reads the fields of one record; a missing or wrong one is an error that names file, record, field and remedy."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where

    def text(self, path: str) -> str:
        """A non-empty string at a dotted path, without outer white space."""
        value = self._get(path)
        if not isinstance(value, str):
            raise self._error(path, f"is {_short(value)}; a text is needed")
        if not value.strip():
            raise self._error(path, "is empty; give a text or drop the record")
        return value.strip()

    def texts(self, path: str) -> list[str]:
        """A list of strings without outer white space; absent means empty."""
        value = self.record.get(path)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(path, f"is {_short(value)}; a list of texts is needed")
        return [item.strip() for item in value]

    def objects(self, path: str) -> list[Mapping[str, Any]]:
        """A non-empty list of objects."""
        value = self._get(path)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise self._error(path, f"is {_short(value)}; a non-empty list of objects is needed")
        return value

    def has(self, path: str) -> bool:
        """Whether a top-level field is present and not null."""
        return self.record.get(path) is not None

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


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
