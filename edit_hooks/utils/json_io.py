"""Reading JSON: one strict parser for everything that users write.

``json.loads`` keeps the last of two equal keys, reads ``1e999`` and ``NaN`` as numbers that no mean survives, and fails
with three different exceptions. Here each of these is an :class:`~edit_hooks.utils.errors.EditingError`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import read_text

JSON_SUFFIXES = (".json", ".jsonl")  # of files of records
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """A JSON text that is well formed and not accepted; the message says why."""


def parse_json(text: str, where: str, *, advice: str = "", finite: bool = True, paired: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        where: file and line, a prefix of error messages.
        advice: a sentence that ends messages about malformed text.
        finite: refuse NaN and infinite numbers. Files that programs write may contain them.
        paired: refuse half surrogate pairs. Files of records may contain some: the record is unusable, not the file.

    Raises:
        EditingError: for malformed text, repeated keys, numbers that are not finite or too long, and deep nesting.
    """
    advice = f" {advice}" if advice else ""
    accept_constant = None if finite else float
    try:
        content = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_float=_finite if finite else None,
            parse_constant=accept_constant or _refuse_constant,
        )
        if paired and _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}, column {error.colno}" if "\n" in text else f", column {error.colno}"
        raise EditingError(f"{where}{place}: not valid JSON ({error.msg}).{advice}") from None
    except _Refused as error:
        raise EditingError(f"{where}: {error}.") from None
    except UnicodeEncodeError:
        raise EditingError(f"{where}: a text holds half of a surrogate pair, which is no character.") from None
    except ValueError:  # the interpreter's limit on digits
        raise EditingError(f"{where}: a whole number has too many digits.") from None
    except RecursionError:
        raise EditingError(f"{where}: the JSON is nested too deeply.") from None


def read_json(path: str | os.PathLike[str], what: str = "JSON file", *, finite: bool = True) -> Any:
    """Read a JSON file.

    Raises:
        EditingError: as :func:`edit_hooks.utils.files.read_text` and :func:`parse_json`.
    """
    return parse_json(read_text(path, what), str(path), finite=finite)


def read_rows(
    path: str | os.PathLike[str], what: str = "file of records", *, finite: bool = True
) -> list[tuple[str, Any]]:
    """The records of a JSON list or JSONL file, each after its location.

    A location names file, record number and line.

    Args:
        what: kind of file, for messages.

    Raises:
        EditingError: with file and line; as :func:`read_json`, and for a file without records.
    """
    path = Path(path)
    text = read_text(path, what)
    rows = list(_json_list(path, text, finite) if text.lstrip().startswith("[") else _json_lines(path, text, finite))
    if not rows:
        raise EditingError(f"{path} holds no records; a JSON list or one JSON object per line is needed.")
    return rows


def _json_list(path: Path, text: str, finite: bool) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(
        parse_json(text, str(path), advice="Fix or re-download it.", finite=finite, paired=False)
    ):
        yield f"{path.name}, record {number}", record


def _json_lines(path: Path, text: str, finite: bool) -> Iterator[tuple[str, Any]]:
    number = 0
    # Not splitlines(): it also breaks at characters such as U+2028, which JSON allows inside a string.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        advice = "Fix or remove the line." if number else "A JSON list or one JSON object per line is needed."
        record = parse_json(line, f"{path}, line {line_number}", advice=advice, finite=finite, paired=False)
        yield f"{path.name}, record {number} (line {line_number})", record
        number += 1


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _Refused(f"the key {key[:80]!r} occurs twice in one object; keep one of them")
        mapping[key] = value
    return mapping


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"the number {text[:40]} is too large; a finite number is needed")
    return number


def _refuse_constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number; write null or a finite number")
