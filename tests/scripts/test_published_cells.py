"""Every cell of the published tables is in exactly one entry of docs/_data/published_tables.yaml.

The tables themselves are the authors' and not part of the repository; without them only the form of the claims is
tested.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from paths import REAL_DATA, ROOT

MAP: dict[str, Any] = yaml.safe_load((ROOT / "docs/_data/published_tables.yaml").read_text(encoding="utf-8"))
ENTRIES = [(name, entry) for name, benchmark in MAP.items() for entry in benchmark["tables"]]
CLAIMS = [(entry["published"], claim) for _, entry in ENTRIES for claim in entry.get("cells", [])]
TABLES = sorted({claim["table"] for _, claim in CLAIMS})
FOLDER = REAL_DATA.parent / "spec" / "published"

# Statistics of the data, and the union of WILD's tables.
NOT_SCORES = {"bake_t8_stats", "thinkedit_t4_chain_lengths", "wild_grid_merged"}

KEYS = {
    "model",
    "editor",
    "method",
    "input",
    "gen_strategy",
    "truncation",
    "metric",
    "dataset",
    "group",
    "sigma",
    "lambda",
}
KEYS |= {"N", "k_stage2", "edit_num", "category", "technique"}


def rows_of(table: str) -> list[dict[str, str]]:
    with (FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cells_of(table: str) -> set[tuple[int, str]]:
    """Row and column of every printed value."""
    return {
        (number, column)
        for number, row in enumerate(rows_of(table))
        for column, value in row.items()
        if column not in KEYS and value not in ("", "-")
    }


def claimed(claim: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The cells that a claim names."""
    for number, row in enumerate(rows_of(claim["table"])):
        if all(matches(row[key], accepted) for key, accepted in claim.get("rows", {}).items()):
            for column in claim.get("columns") or [name for name in row if name not in KEYS]:
                if row[column] not in ("", "-"):
                    yield number, column


def matches(value: str, accepted: Any) -> bool:
    return value not in accepted["not"] if isinstance(accepted, dict) else value in accepted


def test_entries_without_cells_are_figures_or_tables_of_other_papers() -> None:
    missing = [entry["published"] for _, entry in ENTRIES if not entry.get("cells")]
    words = (
        "appendix A (text)",
        "figure",
        "table 7",
        "TMLR table 4",
        "ROME, CounterFact",
        "KnowEdit",
        "MQuAKE, ",
        "WikiBigEdit, ",
        "RippleEdits, ",
        "UnKE, ",
    )
    assert all(any(word in published for word in words) for published in missing), missing


def test_claims_have_a_form_that_selects_rows_and_columns() -> None:
    for published, claim in CLAIMS:
        assert set(claim) <= {"table", "rows", "columns"}, published
        assert set(claim.get("rows", {})) <= KEYS, published


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published tables are not here")
@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_in_exactly_one_entry(table: str) -> None:
    owners: dict[tuple[int, str], list[str]] = {}
    for published, claim in CLAIMS:
        if claim["table"] == table:
            found = list(claimed(claim))
            assert found, f"{published}: {claim} names no cell"
            for cell in found:
                owners.setdefault(cell, []).append(published)
    assert {cell: names for cell, names in owners.items() if len(names) > 1} == {}
    rows = rows_of(table)
    missing = [(list(rows[number].values())[:3], column) for number, column in sorted(cells_of(table) - set(owners))]
    assert missing == []


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published tables are not here")
def test_no_published_table_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.glob("*.csv")} - set(TABLES) == NOT_SCORES
