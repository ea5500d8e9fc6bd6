"""KnowGIC's records: both layouts, rows of one edit, chains and context, aliases, bad records, and published data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.pinned_file import PinnedFile
from lm_eval_tasks.common.records.benchmark import load_edit_requests
from lm_eval_tasks.knowgic import aliases
from lm_eval_tasks.knowgic.benchmark import KNOWGIC
from lm_eval_tasks.knowgic.case import distinct
from lm_eval_tasks.knowgic.chains import prob_doc, sampled_doc

INVENTED = {"data": str(RECORDS / "chains.json")}


def load(tmp_path: Path, records: list[dict[str, Any]], **settings: Any) -> Any:
    return KNOWGIC.load({"data": str(write_jsonl(tmp_path / "k.jsonl", records)), **settings})


def in_one_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row per edit of the earlier layout, from rows of one edit."""
    first = rows[0]
    context: dict[str, list[str]] = {
        name: [text for row in rows for text in row["broader_context"][name]] for name in first["broader_context"]
    }
    rest = {key: first[key] for key in ("case_id", "requested_rewrite")}
    return {**rest, "chains": [row["chain"] for row in rows], "broader_context": context}


def test_rows_of_an_edit_are_one_case_wherever_they_are() -> None:
    loaded = KNOWGIC.load(INVENTED)
    pell, lake, ona, ugo = loaded.records
    assert [case.request.case_id for case in loaded.records] == ["0", "1", "2", "3"]
    assert [case.extras["source_id"] for case in loaded.records] == ["0", "1", "3", "6"]
    assert [len(chain) for chain in pell.chains] == [1, 2, 2, 3] and [len(chain) for chain in lake.chains] == [2, 1]
    assert [hop.answer for hop in pell.chains[3]] == ["Ivo Lunt", "Oda Fenn", "Northgate"]
    assert pell.chains[3][1].statement == "Ivo Lunt was taught by"
    # rows 2, 4, 5: C E, D C D, E G F, repetitions included
    assert [hop.answer for hop in pell.context] == [
        *("Northgate", "Oda Fenn"),
        *("northgate", "Northgate", "northgate"),
        *("Oda Fenn", "Northgate", "Oda Fenn"),
    ]
    assert [len(chain) for chain in ugo.chains] == [5] and not ona.context
    hops = distinct([hop for chain in pell.chains for hop in chain])
    assert [hop.answer for hop in hops].count("Sela Marr") == 1 and len(hops) == 7  # two classmates of one question
    counts = {"records": 4, "rows": 8, "chains": 8, "chains_of_1": 3, "chains_of_2": 3, "chains_of_3": 1}
    counts |= {"chains_of_5": 1, "context_facts": 13, "context_facts_distinct": 10, "ends_in_other_case": 1}
    counts |= {"without_context": 1, "without_neighbors": 1, "repeated_chains": 0}
    assert counts.items() <= loaded.source.items()


def test_both_layouts_give_the_same_cases(tmp_path: Path) -> None:
    rows = invented_records("chains.json")
    grouped = [in_one_row([rows[number] for number in numbers]) for numbers in ((0, 2, 4, 5), (1, 7), (3,), (6,))]
    assert load(tmp_path, grouped).records == KNOWGIC.load(INVENTED).records


def test_neighbors_are_last_facts_about_other_subjects() -> None:
    pell, lake, ona, _ = KNOWGIC.load(INVENTED).records
    assert pell.neighbors == [
        ("Ivo Lunt studied at", "Northgate", "Southmere"),
        ("Sela Marr studied at", "Northgate", "Southmere"),
        ("Oda Fenn teaches at", "Northgate", "Southmere"),
    ]
    assert lake.neighbors == [("Tessa is a town in the country of", "Kenya", "Norway")] and not ona.neighbors


def test_edits_and_subsets_count_edits() -> None:
    first, second, *_ = load_edit_requests("knowgic", INVENTED).cases
    assert [first[0].subject, second[0].subject] == ["Pell Arden", "Lake Vorun"]
    assert len(load_edit_requests("knowgic", {**INVENTED, "subset": 2}).cases) == 2
    with pytest.raises(EditingError, match=r"subset=5, but .* has 4 records"):
        KNOWGIC.load({**INVENTED, "subset": 5})


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("requested_rewrite", [], "'requested_rewrite' is [] (list); a non-empty list of objects is needed"),
        ("chain.answers", ["Kenya"], "'chain.questions' and answers, prompts, subjects have 2, 1, 2, 2 entries"),
        ("chain.subjects", None, "'chain.subjects' is missing"),
        ("chain.subjects", ["Lake Orin", "Tessa"], "leads from 'Lake Orin' to 'Kenya'"),
        ("chain.answers", ["Tessa", "Norway"], "leads from 'Lake Vorun' to 'Norway'"),
        ("chain.prompts", ["is at", "{} is a town in the country of"], "a prompt with one {} are needed"),
        ("chain.prompts", ["{} is at", "{}"], "a statement with words around {} is needed"),
        ("chain.prompts", ["{} is at", " {}'s "], "a statement with words around {} is needed"),
        ("broader_context.subjects", ["lake vorun"], "has a fact about the edited subject"),
    ],
)
def test_bad_records_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = copy.deepcopy(invented_records("chains.json"))
    records[1] = with_field(records[1], path, value)
    with pytest.raises(EditingError) as caught:
        load(tmp_path, records)
    assert "k.jsonl, record 1 (line 2)" in str(caught.value) and problem in str(caught.value)
    assert load(tmp_path, records, bad_records="skip").source["rows"] == 7


def test_two_edits_in_a_record_and_a_chain_without_steps_are_errors(tmp_path: Path) -> None:
    (row,) = copy.deepcopy(invented_records("chains.json")[3:4])
    empty = {**row, "chain": {name: [] for name in row["chain"]}}
    with pytest.raises(EditingError, match="has no step"):
        load(tmp_path, [empty])
    with pytest.raises(EditingError, match="has 2 edits"):
        load(tmp_path, [{**row, "requested_rewrite": row["requested_rewrite"] * 2}])


def test_broken_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "chains.json"
    path.write_text('[{"case_id": 0,\n "chain": }]', encoding="utf-8")
    with pytest.raises(EditingError, match=r"chains\.json.*line 2"):
        KNOWGIC.load({"data": str(path)})


def test_aliases_are_those_beside_the_data_or_as_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (pell, *_) = KNOWGIC.load(INVENTED).records
    names = {"Northgate": ["Northgate School"], "northgate": ["Northgate School"], "Oda Fenn": ["Ms. Fenn", "O. Fenn"]}
    assert sampled_doc(pell, INVENTED)["aliases"] == sampled_doc(pell, {"data": str(RECORDS)})["aliases"] == names
    assert sampled_doc(pell, {**INVENTED, "knowgic_aliases": "none"})["aliases"] == {}
    assert prob_doc(pell, INVENTED)["aliases"] == {}
    assert aliases.find_aliases({"data": "mini"})["kyiv"] == ("Kiev",)
    lonely = write_jsonl(tmp_path / "k.jsonl", invented_records("chains.json"))
    assert sampled_doc(pell, {"data": str(lonely)})["aliases"] == {} and "knowgic_aliases=/path" in caplog.text


@pytest.mark.parametrize(
    "text", ["[]", '{"a": ["b"]}', '{"a": {"answer_alias": "b"}}', '{"a": {"answer_alias": [1]}}', "{"]
)
def test_bad_aliases_are_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "aliases.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EditingError, match=r"aliases\.json"):
        aliases.find_aliases({"knowgic_aliases": str(path)})


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "edits", "by_length", "context"),
    [
        ("chains.json", 26, [24, 108, 227, 428, 619], (9158, 437)),
        ("chains_v1_21cases_558.json", 21, [21, 75, 102, 159, 201], (217, 215)),
    ],
)
def test_published_records(name: str, edits: int, by_length: list[int], context: tuple[int, int]) -> None:
    data = {"data": str(published_data() / "knowgic" / name)}
    loaded = KNOWGIC.load(data)
    source = loaded.source
    assert len(loaded.records) == edits and "unknown_fields" not in source and source["ends_in_other_case"] == 9
    assert [source[f"chains_of_{length}"] for length in range(1, 6)] == by_length
    assert (source["context_facts"], source["context_facts_distinct"]) == context and source["without_neighbors"] == 0
    docs = [sampled_doc(case, data) for case in loaded.records]
    named = [text for doc in docs for text in doc["aliases"]]
    assert "Bill Clinton" in named and "Suffect Consul" not in named  # the second has no entry
    assert json.loads(json.dumps(docs)) == docs
    for doc, case in zip(docs, loaded.records, strict=True):
        prompts = [probe["prompt"] for probe in doc["probes"]]
        questions = {hop.question for chain in case.chains for hop in chain} | {hop.question for hop in case.context}
        assert len(prompts) == len(set(prompts)) == len(questions)
    for case in loaded.records:  # as build-knowgic --context chains
        steps = {hop for chain in case.chains for hop in chain if hop.subject != case.request.subject}
        assert {(hop.statement, hop.answer) for hop in case.context} == {(hop.statement, hop.answer) for hop in steps}
    pinned = KNOWGIC.source.sets["v1" if "v1" in name else "current"]
    assert isinstance(pinned, PinnedFile) and pinned.sha256 == source["sha256"]
