"""JSON: one strict parser for everything that users write, and one writer for texts of any origin.

``json.loads`` keeps the last of two equal keys, reads ``1e999`` and ``NaN`` as numbers that no mean survives, and fails
with three different exceptions. Here each of these is an :class:`~edit_hooks.utils.errors.EditingError`. ``json.dumps``
passes half surrogate pairs on to a file, which cannot hold them; :func:`json_text` escapes them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import read_text

JSON_SUFFIXES = (".json", ".jsonl")  # of files of records
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 100  # of objects and lists in each other; whatever walks the content recursively has room for that
MAX_DIGITS = 308  # of a whole number, so that it has a value as a floating-point number

# Treatment of half surrogate pairs, which no file in UTF-8 can hold: an error; kept, where a record is unusable because
# of one and its file is not; or replaced by U+FFFD, in files of results.
Halves: TypeAlias = Literal["refuse", "keep", "replace"]


class _Refused(ValueError):
    """A JSON text that is well formed and not accepted; the message says why."""


def parse_json(text: str, where: str, *, advice: str = "", finite: bool = True, halves: Halves = "refuse") -> Any:
    """Parse a JSON text.

    Args:
        where: file and line, a prefix of error messages.
        advice: a sentence that ends messages about malformed text.
        finite: refuse NaN and infinite numbers. Files that programs write may contain them.
        halves: treatment of half surrogate pairs.

    Raises:
        EditingError: for malformed text, repeated keys, numbers that are not finite or too long, and deep nesting.
    """
    advice = f" {advice}" if advice else ""
    try:
        content = _decoder(finite).decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _refuse_depth(content)
        if halves != "keep" and _SURROGATE.search(text):
            if halves == "replace":
                return without_half_surrogates(content)
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}, column {error.colno}" if "\n" in text else f", column {error.colno}"
        raise EditingError(f"{where}{place}: not valid JSON ({error.msg}).{advice}") from None
    except _Refused as error:
        raise EditingError(f"{where}: {error}.") from None
    except UnicodeEncodeError:
        raise EditingError(f"{where}: a text holds half of a surrogate pair, which is no character.") from None
    except RecursionError:
        raise EditingError(f"{where}: the JSON is nested too deeply.") from None


def json_text(
    content: object,
    *,
    indent: int | None = None,
    compact: bool = False,
    sort_keys: bool = False,
    allow_nan: bool = True,
) -> str:
    """The JSON text of content, with escapes for half surrogate pairs, which files in UTF-8 cannot hold.

    Every other character stands for itself. Reading the text gives the content again.
    """
    separators = (",", ":") if compact else None
    text = json.dumps(
        content, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=allow_nan
    )
    # Strings are their only place, and Python's escape of one is that of JSON.
    return text.encode("utf-8", "backslashreplace").decode()


def json_lines(rows: Iterable[object]) -> str:
    """JSONL: one line for each row, as :func:`json_text`."""
    return "".join(f"{json_text(row)}\n" for row in rows)


def without_half_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD in place of half surrogate pairs."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {without_half_surrogates(key): without_half_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_half_surrogates(entry) for entry in value]
    return value


def within_64_bits(value: Any) -> Any:
    """A JSON value with floats in place of whole numbers that 64 bits do not hold, as programs with SQLite need.

    A tokenizer without a limit has 10^30 as its longest text.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(value)
    if isinstance(value, Mapping):
        return {key: within_64_bits(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [within_64_bits(entry) for entry in value]
    return value


def read_json(
    path: str | os.PathLike[str],
    what: str = "JSON file",
    *,
    advice: str = "",
    finite: bool = True,
    halves: Halves = "refuse",
) -> Any:
    """Read a JSON file.

    Args:
        what: kind of file, for messages. advice, finite, halves: as of :func:`parse_json`.

    Raises:
        EditingError: as :func:`edit_hooks.utils.storage.files.read_text` and :func:`parse_json`.
    """
    return parse_json(read_text(path, what), str(path), advice=advice, finite=finite, halves=halves)


def read_rows(
    path: str | os.PathLike[str], what: str = "file of records", *, finite: bool = True, halves: Halves = "keep"
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
    read = _json_list if text.lstrip().startswith("[") else _json_lines
    rows = list(read(path, text, finite, halves))
    if not rows:
        raise EditingError(f"{path} holds no records; a JSON list or one JSON object per line is needed.")
    if len(rows) == 1 and (place := _inner_records(rows[0][1])):
        raise EditingError(
            f"{path} is one JSON object with the records {place}; a JSON list or one JSON object per line is needed. "
            "Write the records alone."
        )
    return rows


def _inner_records(content: Any) -> str | None:
    """Where records are in an object around them; ``None`` for a record, which has texts among its fields."""
    if not isinstance(content, Mapping) or not content:
        return None
    inner = list(content.values())
    if (
        len(inner) == 1
        and isinstance(inner[0], list)
        and inner[0]
        and all(isinstance(one, Mapping) for one in inner[0])
    ):
        return f"in the list {str(next(iter(content)))[:80]!r}"
    are_alike = len(inner) > 1 and all(isinstance(one, Mapping) and one.keys() == inner[0].keys() for one in inner)
    return "by their names" if are_alike else None


def _json_list(path: Path, text: str, finite: bool, halves: Halves) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(
        parse_json(text, str(path), advice="Fix or re-download it.", finite=finite, halves=halves)
    ):
        yield f"{path.name}, record {number}", record


def _json_lines(path: Path, text: str, finite: bool, halves: Halves) -> Iterator[tuple[str, Any]]:
    number = 0
    # Not splitlines(): it also breaks at characters such as U+2028, which JSON allows inside a string.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        advice = "Fix or remove the line." if number else "A JSON list or one JSON object per line is needed."
        record = parse_json(line, f"{path}, line {line_number}", advice=advice, finite=finite, halves=halves)
        yield f"{path.name}, record {number} (line {line_number})", record
        number += 1


@functools.cache
def _decoder(finite: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique_keys,
        parse_float=_finite if finite else None,
        parse_int=_whole,
        parse_constant=_refuse_constant if finite else float,
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Refused(f"the key {repeated[:80]!r} occurs twice in one object; keep one of them")
    return mapping


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _Refused("a whole number has too many digits")
    return int(text)


def _refuse_depth(content: Any) -> None:
    """Refuse content whose objects and lists are nested deeper than :data:`MAX_DEPTH`; without recursion."""
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            entries = value.values() if isinstance(value, dict) else value
            inner += [entry for entry in entries if isinstance(entry, (dict, list))]
        if not inner:
            return
        level = inner
    raise _Refused("the JSON is nested too deeply")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"the number {text[:40]} is too large; a finite number is needed")
    return number


def _refuse_constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number; write null or a finite number")
