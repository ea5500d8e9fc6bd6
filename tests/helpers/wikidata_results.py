"""Results of the Wikidata Query Service, as the service or its web page saves them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from lm_edit.builders.bake.wikidata import COLUMNS

ENTITY = "http://www.wikidata.org/entity/"
Rows = list[tuple[str, str, str, str]]


def write_rows(path: Path, rows: Rows, form: str = "list") -> Path:
    """Write rows of (id, label, id, label) as the query service or its web page does."""
    full = [(ENTITY + s if s[:1] == "Q" else s, a, ENTITY + o if o[:1] == "Q" else o, b) for s, a, o, b in rows]
    named = [dict(zip(COLUMNS, row, strict=True)) for row in full]
    if form == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *full])
    elif form == "bindings":
        bindings = [{name: {"type": "x", "value": value} for name, value in row.items()} for row in named]
        path.write_text(json.dumps({"head": {"vars": COLUMNS}, "results": {"bindings": bindings}}), encoding="utf-8")
    else:
        path.write_text(json.dumps(named), encoding="utf-8")
    return path
