"""BAKE's records: the published schema, incomplete records, and published data where it is available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ

QA, JUDGE = {"data": str(RECORDS / "bake_qa.jsonl")}, {"data": str(RECORDS / "bake_judge.json")}


def test_records_are_read_as_published() -> None:
    first, _, third, fourth = BAKE_QJ.load(QA).records
    assert first.request.text == "Port Elna is the capital of"
    assert (first.request.target_new, first.request.target_true) == ("Dravonia", "Ostmark")
    assert first.paraphrases[0][1:] == ("Dravonia", "Ostmark")
    assert first.neighbors[0][1:] == ("Ostmark", "Dravonia")
    assert first.reverse_qa == ("The capital of Dravonia is", "Port Elna", "Veldt")
    assert first.reverse_judge[1:] == ("yes", "no")
    assert third.request.target_true == "Nell Dalen"  # outer white space of targets is dropped
    assert (third.request.case_id, third.extras) == ("2", {"source_id": "1"})  # the row, although the file repeats id 1
    assert third.paraphrases == [] and fourth.neighbors == []
    assert [question.prompt for question in fourth.paraphrases] == ["The product made by Fernhill Ltd is"]  # one blank


def test_incomplete_records_are_counted() -> None:
    source = BAKE_QJ.load(QA).source
    assert (source["without_paraphrases"], source["without_neighbors"], source["blank_prompts"]) == (1, 1, 1)


def test_bake_j_has_no_reverse_question() -> None:
    assert [case.reverse_qa for case in BAKE_J.load(JUDGE).records] == [None, None]
    with pytest.raises(EditingError, match=r"record of BAKE-J, not of BAKE-Q&J"):
        BAKE_QJ.load(JUDGE)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("requested_rewrite.prompt", None, "'requested_rewrite.prompt' is missing"),
        ("requested_rewrite.subject", "Someone", "does not occur in prompt"),
        ("requested_rewrite.target_new.str", "  ", "is empty"),
        ("requested_rewrite.target_true", "Norvania", "'requested_rewrite.target_true.str' is missing"),
        ("requested_rewrite", "text", "'requested_rewrite.target_new.str' is missing"),
        ("paraphrase_prompts", "one prompt", "a list of texts is needed"),
        ("neighborhood_prompts", [1], "a list of texts is needed"),
        ("reverse_qa", None, "record of BAKE-J, not of BAKE-Q&J"),
        ("reverse_judge.prompt", 7, "7 (int); a text is needed"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("bake_qa.jsonl")
    if path == "requested_rewrite.subject":  # without a slot, the subject must occur in the prompt
        records[2]["requested_rewrite"]["prompt"] = "The spouse of Ruk Dalen is"
    records[2] = with_field(records[2], path, value)
    with pytest.raises(EditingError) as caught:
        BAKE_QJ.load({"data": str(write_jsonl(tmp_path / "BAKE_qa.jsonl", records))})
    message = str(caught.value)
    assert "1 of 4 records" in message and "BAKE_qa.jsonl, record 2" in message and problem in message


@pytest.mark.realdata
def test_fixtures_with_the_published_schema() -> None:
    folder = published_data() / "bake"
    qa = BAKE_QJ.load({"data": str(folder / "fixture_INVENTED_qa.json")})
    judge = BAKE_J.load({"data": str(folder / "fixture_INVENTED_judge.json")})
    assert (len(qa.records), len(judge.records)) == (6, 4)
    assert qa.source["without_paraphrases"] + qa.source["without_neighbors"] >= 2
    assert all(case.reverse_qa is not None for case in qa.records)
