"""Record files for tests: the invented records, changed copies of them, and published data."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import REAL_DATA, RECORDS

from edit_hooks.utils.storage.json_io import read_rows


def invented_records(name: str) -> list[dict[str, Any]]:
    """The records of a file in tests/records."""
    return [record for _, record in read_rows(RECORDS / name)]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """Write a JSONL file and return its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def with_field(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a record with the field at a dotted path replaced, or removed by ``None``."""
    changed = copy.deepcopy(record)
    *parents, last = path.split(".")
    inner = changed
    for step in parents:
        inner = inner[step]
    inner.pop(last)
    if value is not None:
        inner[last] = value
    return changed


def published_data() -> Path:
    """The folder with published data files; skips the test if it does not exist."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no published data at {REAL_DATA}; set LM_EDIT_SHARED_DATA to run this")
    return REAL_DATA
