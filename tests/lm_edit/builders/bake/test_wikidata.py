"""``lm-edit bake-facts``: query results in three forms, ambiguous rows, and the file that build-bake reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from wikidata_results import Rows, write_rows

from lm_edit.builders.bake.building import read_fact_table
from lm_edit.builders.facts import Fact

CAPITALS: Rows = [("Q1", "Elmland", "Q11", "Elm"), ("Q2", "Firland", "Q12", "Fir"), ("Q3", "Gumland", "Q13", "Gum")]


def make(tmp_path: Path, rows: Rows, *more: str) -> int:
    path = write_rows(tmp_path / "rows.json", rows)
    return run_verb(["bake-facts", f"P36:capital={path}", "--out", str(tmp_path / "facts.json"), *more])


def facts(tmp_path: Path) -> list[list[str]]:
    return json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))["facts"]


@pytest.mark.parametrize("form", ["list", "bindings", "csv"])
def test_results_become_facts_that_build_bake_reads(form: str, tmp_path: Path, capsys: Any) -> None:
    path = write_rows(tmp_path / f"rows.{'csv' if form == 'csv' else 'json'}", CAPITALS, form)
    assert run_verb(["bake-facts", f"P36:capital={path}", "--out", str(tmp_path / "facts.json")]) == 0
    assert "facts: 3 (P36 3)" in capsys.readouterr().out
    table = read_fact_table(tmp_path / "facts.json")
    assert table.facts == [Fact(s, "P36", o) for _, s, _, o in CAPITALS]
    assert table.labels == {"P36": "capital"} and table.without_templates() == ["P36"]


def test_several_relations_and_repeated_rows(tmp_path: Path, capsys: Any) -> None:
    first, second = (
        write_rows(tmp_path / "a.json", [*CAPITALS, CAPITALS[0]]),
        write_rows(tmp_path / "b.json", CAPITALS[:1]),
    )
    given = ["bake-facts", f"P36:capital={first}", f"other={second}", "--out", str(tmp_path / "facts.json")]
    assert run_verb(given) == 0
    assert "facts: 4 (P36 3, other 1)" in (out := capsys.readouterr().out) and "repeated rows: 1" in out
    content = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert content["relations"] == {"P36": {"label": "capital"}, "other": {}}
    assert set(content["provenance"]["sha256"]) == {"P36", "other"}


@pytest.mark.parametrize(
    ("rows", "reason", "kept"),
    [
        ([("Q4", "Q4", "Q14", "Oak")], "an item has no label", "Elm Fir Gum"),
        ([("Q4", "Oakland", "Q14", "")], "an item has no label", "Elm Fir Gum"),
        ([("Q4", "Oakland", "1917", "1917")], "is no item", "Elm Fir Gum"),
        ([("t123", "", "Q14", "Oak")], "is no item", "Elm Fir Gum"),
        ([("Q4", "Oakland", "Q14", "Oak"), ("Q4", "Oakland", "Q15", "Yew")], "has several objects", "Elm Fir Gum"),
        ([("Q4", "Firland", "Q14", "Oak")], "several items have the same label", "Elm Gum"),
        ([("Q4", "Elm", "Q14", "Oak")], "several items have the same label", "Fir Gum"),  # a subject and an object
        ([("Q3", "Gum Land", "Q13", "Gum")], "an item has several labels", "Elm Fir"),
    ],
)
def test_ambiguous_rows_are_an_error_or_left_out_and_counted(
    rows: Rows, reason: str, kept: str, tmp_path: Path, capsys: Any
) -> None:
    assert make(tmp_path, [*CAPITALS, *rows]) == 2
    assert reason in (message := capsys.readouterr().err) and "--skip-ambiguous" in message
    assert not (tmp_path / "facts.json").exists()
    assert make(tmp_path, [*CAPITALS, *rows], "--skip-ambiguous") == 0
    assert reason in capsys.readouterr().out
    assert [object for _, _, object in facts(tmp_path)] == kept.split()


def test_subjects_with_several_objects_are_accepted_where_wanted(tmp_path: Path) -> None:
    rows = [*CAPITALS, ("Q3", "Gumland", "Q15", "Yew")]
    assert make(tmp_path, rows) == 2
    assert make(tmp_path, rows, "--several-objects") == 0 and len(facts(tmp_path)) == 4
    assert make(tmp_path, rows, "--skip-ambiguous", "--overwrite") == 0
    assert facts(tmp_path) == [["Elmland", "P36", "Elm"], ["Firland", "P36", "Fir"]]


def test_labels_are_compared_over_all_files(tmp_path: Path, capsys: Any) -> None:
    first, second = (
        write_rows(tmp_path / "a.json", CAPITALS),
        write_rows(tmp_path / "b.json", [("Q9", "Elm", "Q8", "Oak")]),
    )
    assert run_verb(["bake-facts", f"a={first}", f"b={second}", "--out", str(tmp_path / "facts.json")]) == 2
    assert "several items have the same label (2)" in capsys.readouterr().err


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = write_rows(tmp_path / "a" / "rows.json", [("Q1", "Q1", "Q11", "Elm"), CAPITALS[1]])
    second = write_rows(tmp_path / "rows.json", [CAPITALS[2], CAPITALS[1]])
    given = ["bake-facts", f"a={first}", f"b={second}", "--skip-ambiguous", "--out", str(tmp_path / "facts.json")]
    assert run_verb(given) == 0
    assert facts(tmp_path) == [["Firland", "a", "Fir"], ["Gumland", "b", "Gum"], ["Firland", "b", "Fir"]]


def test_nothing_but_ambiguous_rows_is_an_error(tmp_path: Path, capsys: Any) -> None:
    assert make(tmp_path, [("Q1", "Q1", "Q2", "Q2")], "--skip-ambiguous") == 2
    assert "no unambiguous row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.csv", "s,o\nx,y\n", "has no column 'sLabel'"),
        ("r.csv", "s,sLabel,o,oLabel\nx\n", "not as many cells"),
        ("r.csv", "s,sLabel,o,oLabel\nx,a,y,b,c\n", "not as many cells"),
        ("r.csv", 's,sLabel,o,oLabel\n"x,a,y,b\n', "not valid CSV"),
        ("r.csv", "s,sLabel,o,oLabel\n", "has no rows"),
        ("r.json", "[]", "has no rows"),
        ("r.json", '{"results": []}', "is no query result"),
        ("r.json", '[{"s": "Q1", "o": "Q2"}]', "has no column 'sLabel'"),
        ("r.json", '[{"s": "Q1", "sLabel": 3, "o": "Q2", "oLabel": "b"}]', "sLabel is 3"),
        ("r.json", "[3]", "is no query result"),
        ("r.json", "{", "not valid JSON"),
    ],
)
def test_files_of_another_form_are_errors(name: str, text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert run_verb(["bake-facts", f"P36={tmp_path / name}", "--out", str(tmp_path / "facts.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rows.json"], "names no relation and file"),
        (["=rows.json"], "names no relation and file"),
        (["P36:=rows.json"], "names no relation and file"),
        (["P36="], "names no relation and file"),
        (["P36=nowhere.json"], "no such file"),
        (["P36=rows.json", "P36=rows.json"], "is given twice"),
        (["P36=rows.json", "--out", "rows.json", "--overwrite"], "is a file of the input"),
    ],
)
def test_mistakes_on_the_command_line(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.json", CAPITALS)
    assert run_verb(["bake-facts", "--out", "facts.json", *given]) == 2
    assert message in capsys.readouterr().err
