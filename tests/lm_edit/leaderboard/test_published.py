"""Numbers printed in papers: they are the printed ones, and belong to columns that exist."""

from __future__ import annotations

import csv
import importlib.util
import re
import sys

import pytest
import yaml
from board_frames import frames
from paths import REAL_DATA, ROOT

from edit_hooks.utils.storage.json_io import read_json
from lm_edit.leaderboard.columns import DEFAULTS, Column, ColumnKey, describe_case_sets, find_columns
from lm_edit.leaderboard.published import FILE, name_of_table, published_rows

FOLDER = REAL_DATA.parent / "spec" / "published"
TASKS = {path.stem for path in (ROOT / "lm_eval_tasks").glob("*/*.yaml")}


def columns(data: str, *names: str) -> list[Column]:
    results, cases = frames({"rome": {name: [1.0, 0.0] for name in names}}, data=data)
    return find_columns(results, describe_case_sets(cases))


def test_rows_are_shown_for_columns_on_the_published_data():
    names = ("bake_es/efficacy_prob", "bake_es/efficacy_magnitude")
    assert published_rows(columns("mini", *names)) == []
    assert published_rows(columns("hub", *names), "none") == []
    assert published_rows(columns("mini", *names), "all") == published_rows(columns("hub", *names))
    (rome,) = [
        row
        for row in published_rows(columns("hub", *names))
        if (row.source, row.model, row.editor) == ("BIRD table 3", "GPT-2 XL (1.5B)", "ROME")
    ]
    # Printed: ES 98.74, EM 78.21.
    assert {metric: value.value for (_, metric), value in rome.values.items()} == {
        "efficacy_prob": 0.9874,
        "efficacy_magnitude": 0.7821,
    }
    assert rome.regime == "single edits"


def test_printed_values_are_beside_columns_of_their_own_set():
    """WILD's table 9 is about 1,000 of the 19,249 rows that its table 3 chooses from."""
    name = "qaedit_wild_reliability/efficacy_wild_judge"
    for data, tables in (("hub:inter_1k", {"WILD table 9"}), ("hub", set()), ("hub:v1", set())):
        assert {row.source for row in published_rows(columns(data, name))} == tables
    name = "counterfact_evk_es/evk_es"
    assert published_rows(columns("hub:multi", name)) and not published_rows(columns("hub", name))


def test_the_set_of_an_entry_is_that_of_its_command():
    named = {}
    for benchmark in yaml.safe_load((ROOT / "docs/_data/published_tables.yaml").read_text(encoding="utf-8")).values():
        for entry in benchmark["tables"]:
            for data in re.findall(r"data=(hub[:\w]*)", str(entry.get("run", ""))):
                if entry.get("cells") and entry["agreement"] != "none":
                    named[entry["published"]] = (data, entry.get("data", "hub"))
    assert len(named) > 30 and {data for data, _ in named.values()} >= {"hub", "hub:multi", "hub:v1"}
    assert {published: both for published, both in named.items() if both[0] != both[1]} == {}


def test_every_table_has_a_name_for_readers():
    file = read_json(FILE)
    names = {table: name_of_table(table, file["papers"]) for table in {row["table"] for row in file["rows"]}}
    assert names["bird_t3"] == "BIRD table 3" and names["bake_t5_concept"] == "BAKE (TMLR) table 5"
    assert names["thinkedit_t5_t6"] == "ThinkEdit tables 5 and 6"
    assert names["thinkedit_appendix_chains"] == "ThinkEdit appendix"
    assert len(set(names.values())) == len(names)


def test_stages_of_streams_have_no_printed_rows():
    (column,) = columns("hub", "bake_es/efficacy_prob")
    assert published_rows([column._replace(key=ColumnKey("bake_es", "efficacy_prob", "immediate", "none"))]) == []


def test_every_value_belongs_to_a_task():
    for row in read_json(FILE)["rows"]:
        assert {value[0] for value in row["values"]} <= TASKS, row["table"]


def test_columns_shown_first_are_those_of_tasks():
    stock = {"mmlu", "ifeval", "gsm8k", "arc_challenge", "truthfulqa_mc2"}
    assert set(yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))) <= TASKS | stock


def test_what_differs_is_what_the_map_says():
    """Each value's text and agreement are still in docs/_data/published_tables.yaml; this needs no printed tables."""
    path = ROOT / "docs/_data/published_tables.yaml"
    benchmarks = yaml.safe_load(path.read_text(encoding="utf-8")).values()
    entries = [entry for benchmark in benchmarks for entry in benchmark["tables"]]
    mapped = {(entry["agreement"], entry["differs"], entry.get("data", "hub")) for entry in entries}
    written = read_json(FILE)
    rows = (value[4:] for row in written["rows"] for value in row["values"])
    assert {(agreement, written["differs"][note], data) for agreement, note, data in rows} <= mapped, (
        "python scripts/published_values.py FOLDER writes the file from the map again"
    )


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published tables are not here")
def test_the_file_is_what_the_script_writes():
    """From the printed tables and docs/_data/published_tables.yaml; python scripts/published_values.py FOLDER."""
    path = ROOT / "scripts" / "published_values.py"
    specification = importlib.util.spec_from_file_location("published_values", path)
    script = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = script
    try:
        specification.loader.exec_module(script)
        assert script.collect(FOLDER) == read_json(FILE)
    finally:
        del sys.modules[specification.name]


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published tables are not here")
def test_values_are_the_printed_ones():
    """Every value is in the row of its model and editor, 100 times ours but in WILD and ThinkEdit."""
    checked = 0
    for row in read_json(FILE)["rows"]:
        with (FOLDER / f"{row['table']}.csv").open(encoding="utf-8", newline="") as file:
            printed = list(csv.DictReader(file))
        scale = 1 if row["table"].startswith(("wild", "thinkedit")) else 100
        for _, _, value, column, *_ in row["values"]:
            cells = {
                float(line[column])
                for line in printed
                if row["editor"] in (line.get("editor"), line.get("method"), line.get("technique"), column)
                and line[column] not in ("", "-")
                and line.get("model", row["model"]) == row["model"]
            }
            assert any(abs(value * scale - cell) < 1e-4 for cell in cells), (row["table"], row["editor"], column)
            checked += 1
    assert checked > 1500
