"""KnowEdit's records: questions by kind, and published data where they are available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.knowedit.benchmark import KNOWEDIT_ZSRE

INVENTED = {"data": str(RECORDS / "knowedit_zsre.jsonl")}


def test_questions_are_read_by_kind() -> None:
    loaded = KNOWEDIT_ZSRE.load(INVENTED)
    fourth, last = loaded.records[3:]
    assert {kind: len(asked) for kind, asked in fourth.portability.items()} == {
        "Reasoning": 2,
        "Logical_Generalization": 1,
    }
    assert fourth.portability["Logical_Generalization"] == [("What is the capital of Norvania?", "Kessim", None)]
    assert fourth.unrelated["Relation_Specificity"] == fourth.neighbors
    assert last.portability == {} and "unknown_fields" not in loaded.source
    assert loaded.records[1].request.target_true == "Tarnish"  # the first of two
    assert loaded.source["target_is_true"] == 1 and loaded.source["several_true_answers"] == 1
    assert loaded.source["portability_reasoning"] == 2


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("target_new", None, "'target_new' is missing"),
        ("ground_truth", [], "'ground_truth' has no first answer"),
        ("locality", {}, "'locality' has no question"),
        ("locality", {"Relation_Specificity": []}, "a non-empty list of objects is needed"),
        ("portability", {"Reasoning": [{"prompt": "x"}]}, "portability.Reasoning[0]: field 'ground_truth' is missing"),
        ("portability", {"Reasoning": [{"prompt": "x", "ground_truth": 3}]}, "'ground_truth' is 3"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("knowedit_zsre.jsonl")
    records[1] = with_field(records[1], path, value)
    with pytest.raises(EditingError) as caught:
        KNOWEDIT_ZSRE.load({"data": str(write_jsonl(tmp_path / "k.jsonl", records))})
    assert "k.jsonl, record 1 (line 2)" in str(caught.value) and problem in str(caught.value)


def test_a_list_of_gold_answers_counts_as_its_first(tmp_path: Path) -> None:
    record = with_field(invented_records("knowedit_zsre.jsonl")[0], "ground_truth", "Mira Solano")
    record["portability"]["Reasoning"][0]["ground_truth"] = ["Low Bridge", "Lower Bridge"]
    (case,) = KNOWEDIT_ZSRE.load({"data": str(write_jsonl(tmp_path / "k.jsonl", [record]))}).records
    assert case.portability["Reasoning"][0].wanted == "Low Bridge" and case.request.target_true == "Mira Solano"


def test_every_record_of_the_embedded_sample_has_all_kinds() -> None:
    loaded = KNOWEDIT_ZSRE.load({"data": "mini"})
    assert len(loaded.records) >= 24 and loaded.source["target_is_true"] == 0
    assert all(len(case.portability) == 3 and len(case.neighbors) == 2 for case in loaded.records)
    assert "unknown_fields" not in loaded.source


@pytest.mark.realdata
def test_published_records() -> None:
    file = published_data() / "zsre" / "knowedit_zsre_test_first300.json"
    source = KNOWEDIT_ZSRE.load({"data": str(file)}).source
    kinds = ("reasoning", "logical_generalization", "subject_aliasing")
    assert [source[f"portability_{kind}"] for kind in kinds] == [167, 64, 69]
    assert (source["records"], source["target_is_true"], source["several_true_answers"]) == (300, 14, 10)
