"""Categories of relations: by hand, in properties, and as the verbs of the builder print and use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb, split_cells
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from wikidata_results import write_rows

from lm_edit.builders.bake.building import NO_NEW_OBJECT, NO_SINGLE_ANSWER, build_records, read_fact_table
from lm_edit.builders.bake.categories import RULES, categorize
from lm_edit.builders.facts import Fact

EXAMPLE = ROOT / "docs" / "templates" / "bake_facts.json"
INVERSE = {"one-to-many": "many-to-one", "many-to-one": "one-to-many"}


def facts_of(*pairs: str) -> list[Fact]:
    """Facts of one relation from pairs of letters."""
    return [Fact(subject, "r", object) for subject, object in pairs]


@pytest.mark.parametrize(
    ("pairs", "by_mean", "by_any"),
    [
        ("aA bB cC", "one-to-one", "one-to-one"),
        ("aA aB bC", "one-to-many", "one-to-many"),  # three facts of two subjects: just 1.5
        ("aA aB bC cD", "one-to-one", "one-to-many"),  # 4/3: an exception
        ("aA bA cB", "many-to-one", "many-to-one"),
        ("aA bA cB dC", "one-to-one", "many-to-one"),
        ("aA aB bA bB", "many-to-many", "many-to-many"),
        ("aA aB bA cC dD eE", "one-to-one", "many-to-many"),
        ("aA aA aA aA", "one-to-one", "one-to-one"),  # one fact, repeated
        ("aA aB aC aD bA", "one-to-many", "many-to-many"),
    ],
)
def test_categories_by_hand(pairs: str, by_mean: str, by_any: str) -> None:
    facts = facts_of(*pairs.split())
    assert categorize(facts)["r"].name == categorize(facts, "mean")["r"].name == by_mean
    assert categorize(facts, "any")["r"].name == by_any


def test_counts_of_both_ends() -> None:
    found = categorize([*facts_of("aA", "aB", "bB", "cB", "cC"), Fact("a", "q", "A")])
    assert list(found) == ["r", "q"]
    assert found["r"].num_facts == 5
    assert found["r"].subjects == (3, 2, 5 / 3) and found["r"].objects == (3, 1, 5 / 3)
    assert str(found["r"].subjects) == "2 of 3 (66.7%), mean 1.67"


@pytest.mark.parametrize(("pairs", "form"), [("aA", "qa"), ("aA aB", "qa"), ("aA bA", "judge"), ("aA aB bA", "judge")])
def test_the_papers_ask_for_judgments_only_where_the_reverse_question_has_several_answers(
    pairs: str, form: str
) -> None:
    assert categorize(facts_of(*pairs.split()), "any")["r"].form == form


@given(pairs=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("ABCD")), min_size=1, max_size=12))
def test_the_inverse_relation_has_the_inverse_category(pairs: list[tuple[str, str]]) -> None:
    for rule in RULES:
        there = categorize([Fact(a, "r", b) for a, b in pairs], rule)["r"]
        back = categorize([Fact(b, "r", a) for a, b in pairs], rule)["r"]
        assert back.name == INVERSE.get(there.name, there.name)
        assert (back.subjects, back.objects) == (there.objects, there.subjects)
        assert categorize([Fact(a, "r", b) for a, b in reversed(pairs)], rule)["r"] == there


def printed_table(text: str) -> dict[str, list[str]]:
    """Cells of the printed table of categories, by relation."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("relation "))
    rows = [split_cells(line) for line in lines[start + 1 :]]
    return {row[0]: row[1:] for row in rows if row[-1].startswith("--form ")}


def build(tmp_path: Path, *words: str) -> int:
    return run_verb(["build-bake", "--filter", "none", "--out", str(tmp_path / "bake.json"), "--overwrite", *words])


def test_build_bake_prints_the_categories_of_the_relations_to_edit(tmp_path: Path, capsys: Any) -> None:
    assert build(tmp_path, str(EXAMPLE), "--form", "judge") == 0
    out = capsys.readouterr().out
    assert printed_table(out) == {
        "capital_of": ["one-to-one", "10", "0 of 10 (0.0%), mean 1.00", "0 of 10 (0.0%), mean 1.00", "--form qa"],
        "city_in": ["many-to-one", "30", "0 of 30 (0.0%), mean 1.00", "10 of 10 (100.0%), mean 3.00", "--form judge"],
    }
    warnings = [line for line in out.split("\n") if line.startswith("warning")]
    assert len(warnings) == 1 and warnings[0].endswith("(--form qa): capital_of (one-to-one)")
    assert build(tmp_path, str(EXAMPLE), "--relations", "capital_of") == 0
    out = capsys.readouterr().out
    assert list(printed_table(out)) == ["capital_of"] and "warning" not in out


def table_of(tmp_path: Path, facts: list[list[str]]) -> str:
    """A file of facts of one relation with all templates."""
    wording = {"prompts": ["{} was written by", "Who wrote {}?"], "reverse": ["{} wrote"],
               "judge": "Whether {object} wrote {subject}?"}  # fmt: skip
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"relations": {"author": wording}, "facts": facts}), encoding="utf-8")
    return str(path)


WORKS = [["Hamlet", "author", "Bo"], ["Othello", "author", "Bo"], ["Emma", "author", "Cy"], ["Faust", "author", "Cy"]]


def test_questions_with_several_answers_are_a_warning_and_a_reason_of_their_own(tmp_path: Path, capsys: Any) -> None:
    """No author has one work, so nothing is left; with one who has, all edits go to that author."""
    facts = table_of(tmp_path, WORKS)
    left_out = build_records(read_fact_table(facts), "qa").left_out
    assert [reason for _, reason in left_out] == [NO_SINGLE_ANSWER] * 4
    assert build(tmp_path, facts) == 2
    out = capsys.readouterr().out
    assert "no new objects here: author (many-to-one)" in out and f"left out, {NO_SINGLE_ANSWER}: " in out
    assert build(tmp_path, facts, "--form", "judge") == 0 and "warning" not in capsys.readouterr().out
    more = table_of(tmp_path, [*WORKS, ["Ulysses", "author", "Di"]])
    built = build_records(read_fact_table(more), "qa")
    assert {record["requested_rewrite"]["target_new"]["str"] for record in built.records} == {"Di"}
    assert [reason for fact, reason in built.left_out if fact.subject == "Ulysses"] == [NO_SINGLE_ANSWER]


def test_without_any_other_object_the_reason_is_the_general_one(tmp_path: Path) -> None:
    """Of the one object there is, also a judgment needs another."""
    alone = read_fact_table(table_of(tmp_path, WORKS[:2]))
    for form in ("qa", "judge"):
        assert [reason for _, reason in build_records(alone, form).left_out] == [NO_NEW_OBJECT] * 2


def test_the_rule_is_an_option(tmp_path: Path, capsys: Any) -> None:
    """One object in four is shared: an exception by the mean, not by the definition."""
    facts = table_of(tmp_path, [*WORKS[:3], ["Faust", "author", "Di"], ["Ulysses", "author", "Eve"]])
    assert build(tmp_path, facts, "--category-rule", "any") == 0
    assert "warning" in (out := capsys.readouterr().out) and printed_table(out)["author"][0] == "many-to-one"
    records = (tmp_path / "bake.json").read_bytes()
    assert build(tmp_path, facts) == 0
    assert "warning" not in (out := capsys.readouterr().out) and printed_table(out)["author"][0] == "one-to-one"
    assert (tmp_path / "bake.json").read_bytes() == records


FOUNDERS = [("Q1", "Elm Inc.", "Q11", "Ada"), ("Q2", "Fir Inc.", "Q11", "Ada"), ("Q3", "Gum Inc.", "Q12", "Bo")]


def make(tmp_path: Path, *words: str) -> int:
    return run_verb(["bake-facts", *words, "--out", str(tmp_path / "facts.json"), "--overwrite"])


def test_bake_facts_prints_categories_and_swaps_the_file_of_the_inverse_relation(tmp_path: Path, capsys: Any) -> None:
    path = write_rows(tmp_path / "P112.json", FOUNDERS)
    both = [f"P112:founded by={path}", f"re_P112:founder of={path}", "--swap", "re_P112"]
    assert make(tmp_path, *both) == 2 and "the subject has several objects (2)" in capsys.readouterr().err
    assert make(tmp_path, *both, "--several-objects") == 0
    table = printed_table(capsys.readouterr().out)
    assert table["P112"] == [
        "many-to-one",
        "3",
        "0 of 3 (0.0%), mean 1.00",
        "1 of 2 (50.0%), mean 1.50",
        "--form judge",
    ]
    assert table["re_P112"] == ["one-to-many", "3", table["P112"][3], table["P112"][2], "--form qa"]
    content = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert content["facts"] == [
        ["Elm Inc.", "P112", "Ada"], ["Fir Inc.", "P112", "Ada"], ["Gum Inc.", "P112", "Bo"],
        ["Ada", "re_P112", "Elm Inc."], ["Ada", "re_P112", "Fir Inc."], ["Bo", "re_P112", "Gum Inc."],
    ]  # fmt: skip
    assert content["provenance"]["swapped"] == ["re_P112"]
    assert make(tmp_path, f"P112={path}", "--category-rule", "any") == 0
    content = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert "swapped" not in content["provenance"]


def test_a_swapped_name_needs_a_file(tmp_path: Path, capsys: Any) -> None:
    path = write_rows(tmp_path / "P112.json", FOUNDERS)
    assert make(tmp_path, f"re_P112={path}", "--swap", "reP112") == 2
    assert "no file is given for this relation. Did you mean 're_P112'" in capsys.readouterr().err


def test_rows_that_are_left_out_count_for_the_category(tmp_path: Path, capsys: Any) -> None:
    """Without them every subject would have one object. A date is no object; a repeated row counts once."""
    rows = [*FOUNDERS, FOUNDERS[2], ("Q1", "Elm Inc.", "Q13", "Cy"), ("Q1", "Elm Inc.", "Q14", "Q14")]
    path = write_rows(tmp_path / "P112.json", [*rows, ("Q3", "Gum Inc.", "1917", "1917")])
    assert make(tmp_path, f"P112={path}", "--skip-ambiguous", "--category-rule", "any") == 0
    out = capsys.readouterr().out
    assert "facts: 1 (P112 1)" in out and "the table also counts 4 pairs of items whose rows are left out" in out
    ends = ["1 of 3 (33.3%), mean 1.67", "1 of 4 (25.0%), mean 1.25"]
    assert printed_table(out)["P112"] == ["many-to-many", "5", *ends, "--form judge"]
    path = write_rows(tmp_path / "P112.json", FOUNDERS)
    assert make(tmp_path, f"P112={path}") == 0 and "also counts" not in capsys.readouterr().out
