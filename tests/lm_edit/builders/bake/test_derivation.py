"""``lm-edit bake-templates``: templates read off records, of which they are, and what is reported instead of kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from hypothesis import given
from hypothesis import strategies as st
from paths import REAL_DATA, RECORDS, ROOT

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows
from lm_edit.builders.bake.building import FactTable, build_records, read_fact_table
from lm_edit.builders.bake.derivation import NO_NAMES, NO_OBJECT, NO_SUBJECT, NO_WORDS, derive
from lm_edit.builders.bake.templates import RelationTemplates, fill, read_templates
from lm_edit.builders.facts import Fact
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ

EXAMPLE = ROOT / "docs" / "templates" / "bake_facts.json"


def record(subject: str, new: str, **change: Any) -> dict[str, Any]:
    """A record of the relation "mayor" with its templates filled in."""
    made: dict[str, Any] = {
        "case_id": 0,
        "requested_rewrite": {
            "prompt": "{} is the mayor of",
            "relation_id": "mayor",
            "subject": subject,
            "target_new": {"str": new},
            "target_true": {"str": "Old"},
        },
        "paraphrase_prompts": [f"Who says {subject}? The mayor of"],
        "neighborhood_prompts": ["Oak is a twin of"],
        "reverse_qa": {
            "prompt": f"The mayor of {new} is",
            "target_new": {"str": subject},
            "target_true": {"str": "Other"},
        },
        "reverse_judge": {
            "prompt": f"Whether the mayor of {new} is {subject}?",
            "target_new": {"str": "yes"},
            "target_true": {"str": "no"},
        },
    }
    return made | change


def rows(*records: Any) -> list[tuple[str, Any]]:
    return [(f"record {number}", one) for number, one in enumerate(records)]


def question(record: dict[str, Any], name: str, prompt: str) -> dict[str, Any]:
    return {name: {**record[name], "prompt": prompt}}


# ------------------------------------------------------------------ templates


def test_shared_templates_are_kept_and_single_ones_reported() -> None:
    odd = record("Cy", "Gum", paraphrase_prompts=["Cy the Elder, mayor of", "Cy and Cy govern", "Nobody governs"])
    derived = derive(rows(record("Ada", "Elm"), record("Bo", "Fir"), odd))
    assert derived.wordings["mayor"] == RelationTemplates(
        ("{} is the mayor of", "Who says {}? The mayor of"),
        ("The mayor of {} is",),
        "Whether the mayor of {object} is {subject}?",
    )
    assert derived.rest["mayor"] == {"prompts": {"{} the Elder, mayor of": 1}, "reverse": {}, "judge": {}}
    assert derived.kept["mayor"]["prompts"] == {"{} is the mayor of": 3, "Who says {}? The mayor of": 2}
    assert [(one.text, one.reason) for one in derived.unread] == [
        ("Cy and Cy govern", NO_SUBJECT),
        ("Nobody governs", NO_SUBJECT),
    ]


def test_the_frequency_of_a_template_counts_beside_that_of_the_most_frequent_one() -> None:
    many = [record(f"S{number}", f"O{number}") for number in range(30)]
    rare = record("Ada", "Elm", paraphrase_prompts=["Ada governs"])
    derived = derive(rows(*many, rare, rare))
    assert "{} governs" not in derived.wordings["mayor"].prompts and derived.rest["mayor"]["prompts"] == {
        "{} governs": 2
    }
    assert "{} governs" in derive(rows(*many, rare, rare), min_share=0.05).wordings["mayor"].prompts
    assert "{} governs" not in derive(rows(*many, rare, rare), min_share=0.05, min_records=3).wordings["mayor"].prompts


def test_a_relation_has_one_judge_question() -> None:
    other = record("Cy", "Gum")
    other |= question(other, "reverse_judge", "Whether Gum is governed by Cy?")
    derived = derive(rows(record("Ada", "Elm"), record("Bo", "Fir"), other, other, other), min_records=1)
    assert derived.wordings["mayor"].judge == "Whether {object} is governed by {subject}?"
    assert derived.rest["mayor"]["judge"] == {"Whether the mayor of {object} is {subject}?": 2}


@pytest.mark.parametrize(
    ("subject", "new", "judge", "template"),
    [
        ("York", "New York", "Whether New York is York?", "Whether {object} is {subject}?"),
        ("New York", "York", "Whether York is New York?", "Whether {object} is {subject}?"),
        ("object", "subject", "Whether subject is object?", "Whether {object} is {subject}?"),
        ("Ann", "Anna", "Whether Anna is Ann?", "Whether {object} is {subject}?"),
        ("Ada", "Elm", "Whether Elm is Ada of Elm?", None),
        ("Ada", "Elm", "Whether Elm is hers?", None),
        ("Ada", "Elm", "Is Elm Ada?", None),
        ("Ada", "Elm", "Whether {} of Elm is Ada?", None),
    ],
)
def test_names_inside_of_each_other(subject: str, new: str, judge: str, template: str | None) -> None:
    one = record(subject, new)
    derived = derive(rows(one | question(one, "reverse_judge", judge)), min_records=1)
    assert derived.wordings["mayor"].judge == template
    assert [entry.kind for entry in derived.unread if entry.kind == "judge"] == ([] if template else ["judge"])


def test_texts_that_are_no_templates_have_a_reason() -> None:
    one = record("Ada", "Elm", paraphrase_prompts=["Ada", "Ada {} governs"])
    one |= question(one, "reverse_qa", "The mayor of Elmwood is")
    one |= question(one, "reverse_judge", "Whether the mayor is Ada?")
    derived = derive(rows(one), min_records=1)
    assert [(entry.kind, entry.reason) for entry in derived.unread] == [
        ("prompts", NO_WORDS), ("prompts", NO_WORDS), ("reverse", NO_OBJECT), ("judge", NO_NAMES),
    ]  # fmt: skip
    assert derived.wordings["mayor"] == RelationTemplates(("{} is the mayor of",))


@pytest.mark.parametrize("change", ["text", {"requested_rewrite": {}}, {"reverse_judge": None}])
def test_bad_records_are_errors(change: Any) -> None:
    with pytest.raises(EditingError, match="record 0"):
        derive(rows(change if isinstance(change, str) else record("Ada", "Elm") | change))
    nameless = record("Ada", "Elm")
    del nameless["requested_rewrite"]["relation_id"]
    with pytest.raises(EditingError, match="names no relation"):
        derive(rows(nameless))


NAMES = st.text(alphabet="ABCabc", min_size=1, max_size=3)


@given(
    pairs=st.lists(st.tuples(NAMES, NAMES), min_size=3, max_size=12, unique=True),
    form=st.sampled_from(["qa", "judge"]),
    seed=st.integers(0, 5),
)
def test_templates_of_built_records_are_those_they_were_built_with(
    pairs: list[tuple[str, str]], form: str, seed: int
) -> None:
    """No template is invented, and every text of a record is a template, or has a name in it twice."""
    wording = RelationTemplates(
        ("{} runs 1", "The 2 runs {} in", "4, says {}, in"),
        ("5 {} is", "{} has 6 as"),
        "Whether 7 {object} is {subject}?",
    )
    twin = RelationTemplates(("{} is a twin of", "8 {} and"))
    facts = [Fact(subject, "r", object) for subject, object in pairs]
    facts += [Fact(f"x{number}", "twin", object) for number, (_, object) in enumerate(pairs)]
    built = build_records(FactTable({"r": wording, "twin": twin}, facts), form, relations=["r"], seed=seed)
    derived = derive(rows(*built.records), min_records=1, min_share=0)
    for found in derived.wordings.values():
        assert set(found.prompts) <= set(wording.prompts) and set(found.reverse) <= set(wording.reverse)
        assert found.judge in (None, wording.judge)
    assert not [entry for entry in derived.unread if entry.kind != "judge"]
    for entry in derived.unread:
        assert entry.reason == NO_NAMES


# ------------------------------------------------------------------ the verb


def test_records_facts_and_derived_templates_make_the_records_again(tmp_path: Path, capsys: Any) -> None:
    """The circle: build, read the templates off, and build from facts without templates."""
    table = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    names = {"capital_of": {}, "city_in": {"prompts": table["relations"]["city_in"]["prompts"]}}
    without = tmp_path / "facts.json"
    without.write_text(json.dumps(table | {"relations": names}), encoding="utf-8")
    options = ["--relations", "capital_of", "--filter", "none", "--out"]
    assert run_verb(["build-bake", str(EXAMPLE), *options, str(tmp_path / "first.json")]) == 0
    templates = tmp_path / "templates.json"
    assert run_verb(["bake-templates", str(tmp_path / "first.json"), "--out", str(templates)]) == 0
    assert "capital_of: 10 records, prompts 3, reverse 2, judge 1; not kept 0" in capsys.readouterr().out
    derived, original = read_templates(templates)["capital_of"], read_fact_table(EXAMPLE).relations["capital_of"]
    assert set(derived.prompts) == set(original.prompts) and set(derived.reverse) == set(original.reverse)
    assert derived.judge == original.judge
    again = ["build-bake", str(without), "--templates", str(templates), *options, str(tmp_path / "second.json")]
    assert run_verb(again) == 0
    assert len(json.loads((tmp_path / "second.json").read_text())) == 10


@pytest.mark.parametrize("name", ["bake_qa.jsonl", "bake_judge.json"])
def test_the_invented_records_are_filled_templates(name: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.json"
    assert run_verb(["bake-templates", str(RECORDS / name), "--min-records", "1", "--out", str(out)]) == 0
    wordings = read_templates(out)
    benchmark = BAKE_QJ if "qa" in name else BAKE_J
    loaded = benchmark.load({"data": str(RECORDS / name)})
    for case, (_, one) in zip(loaded.records, read_rows(RECORDS / name), strict=True):
        wording = wordings[one["requested_rewrite"]["relation_id"]]
        filled = {fill(template, case.request.subject) for template in wording.prompts}
        assert {case.request.text, *(probe.prompt for probe in case.paraphrases)} <= filled
        assert wording.judge_question(case.request.subject, case.request.target_new) == case.reverse_judge.prompt
    assert run_verb(["bake-templates", str(RECORDS / name), "--out", str(tmp_path / "u.json")]) == 2
    assert "Lower --min-records" in capsys.readouterr().err and not (tmp_path / "u.json").exists()


def test_two_files_are_read_together_and_other_benchmarks_are_refused(tmp_path: Path, capsys: Any) -> None:
    both = [str(RECORDS / "bake_qa.jsonl"), str(RECORDS / "bake_judge.json")]
    assert run_verb(["bake-templates", *both, "--min-records", "1", "--out", str(tmp_path / "t.json")]) == 0
    content = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert content["provenance"]["records"]["P50"] == 2 and len(content["provenance"]["sha256"]) == 2
    assert run_verb(["bake-templates", str(RECORDS / "qaedit.jsonl"), "--out", str(tmp_path / "u.json")]) == 2
    assert run_verb(["bake-templates", both[0], "--out", both[0], "--overwrite"]) == 2
    assert "is a file of the input" in capsys.readouterr().err


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["qa", "judge"])
def test_records_of_the_shared_folder_have_templates(name: str) -> None:
    path = REAL_DATA / "bake" / f"fixture_INVENTED_{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    derived = derive(read_rows(path), min_records=1)
    assert set(derived.wordings) == set(derived.counts) and not derived.unread
