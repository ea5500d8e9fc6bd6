"""Records of another layout, and fields that no parser reads, never pass in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from record_files import invented_records, published_data, write_jsonl
from task_runs import run

from edit_hooks.utils.errors import EditingError
from lm_edit.tuning.cases import load_cases
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.common.records.fields import Fields


def run_on(task: str, folder: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    """One task on records, with a scripted model."""
    return run(task, settings={"data": str(write_jsonl(folder / "records.jsonl", records))})


def source_of(results: dict[str, Any], task: str) -> dict[str, Any]:
    return results["configs"][task]["metadata"]["data_source"]


@pytest.mark.parametrize("field", ["neighborhood_targets", "neighborhood_answers", "locality_answer"])
def test_bake_concept_records_are_refused_by_bake_j(field: str, tmp_path: Path) -> None:
    """Their neighborhood prompts have answers of their own; bake_j would score another gold."""
    records = invented_records("bake_concept.json")
    for record in records:
        record[field] = record.pop("neighborhood_targets")
    with pytest.raises(
        EditingError, match=r"BAKE-J.*BAKE-concept.*bake_concept|BAKE-concept, not of BAKE-J.*bake_concept"
    ):
        run_on("bake_j_ls", tmp_path, records)


def test_bake_j_records_are_refused_by_bake_concept(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"a record of BAKE-J, not of BAKE-concept. Use the tasks of bake_j\."):
        run_on("bake_concept_ls", tmp_path, invented_records("bake_judge.json"))


def test_records_of_the_other_bake_file_name_the_tasks_for_them(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"of BAKE-Q&J, not of BAKE-J, which has no field 'reverse_qa'.*bake_qj"):
        run_on("bake_j_es", tmp_path, invented_records("bake_qa.jsonl"))
    with pytest.raises(EditingError, match=r"of BAKE-J, not of BAKE-Q&J. Use the tasks of bake_j"):
        run_on("bake_es", tmp_path, invented_records("bake_judge.json"))


def test_unknown_fields_are_counted_in_the_results_and_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = invented_records("bake_qa.jsonl")
    records[0]["attribute_prompts"] = ["text"]
    for record in records[:2]:
        record["requested_rewrite"]["target_new"]["id"] = "Q1"
    with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
        for task in ("bake_es", "bake_gs"):
            source = source_of(run_on(task, tmp_path, records), task)
            assert source["unknown_fields"] == {"attribute_prompts": 1, "requested_rewrite.target_new.id": 2}
    warnings = [record.getMessage() for record in caplog.records if "does not use" in record.getMessage()]
    assert len(warnings) == 1 and "attribute_prompts (1 records)" in warnings[0]


@pytest.mark.parametrize(
    ("task", "file", "field"),
    [("bake_gs", "bake_qa.jsonl", "paraphrase_prompts"), ("bake_ls", "bake_qa.jsonl", "neighborhood_prompts")],
)
def test_a_misspelled_optional_field_is_an_error(task: str, file: str, field: str, tmp_path: Path) -> None:
    """Without it, every case would be unscored for want of prompts."""
    records = invented_records(file)
    records[1][field.removesuffix("s")] = records[1].pop(field)
    with pytest.raises(EditingError, match=rf"record 1.*is not known. Did you mean {field!r}"):
        run_on(task, tmp_path, records)


def test_every_object_of_a_list_counts() -> None:
    record = {"list": [{"a": "x"}, {"a": "y", "b": {"c": 1}}], "name": {"str": "z"}, "more": [1, 2]}
    fields = Fields(record, "place")
    fields.objects("list")[0].text("a")
    fields.text("name.str")
    assert fields.unread() == ["list[].b", "more"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qaedit", "qaedit/QAEdit_inter_1k.json"),
        ("bake", "bake/fixture_INVENTED_qa.json"),
        ("bake_j", "bake/fixture_INVENTED_judge.json"),
        ("bake_concept", "bake/fixture_INVENTED_concept.json"),
        ("bake", "mini"),
        ("bake_j", "mini"),
        ("bake_concept", "mini"),
        ("qaedit", "mini"),
    ],
)
def test_published_files_and_samples_have_no_unknown_field(name: str, file: str) -> None:
    data = file if file == "mini" else str(published_data() / file)
    assert "unknown_fields" not in all_benchmarks()[name].load({"data": data}).source


def test_a_misspelled_field_of_a_tuning_case_is_an_error(tmp_path: Path) -> None:
    case = {
        "prompt": "{} is in",
        "subject": "Velm",
        "target_new": "Karsk",
        "rephrase_promt": ["Velm lies in"],
        "locality_prompt": "Ulm is in",
        "locality_ground_truth": "Germany",
    }
    with pytest.raises(EditingError, match=r"'rephrase_promt' is not known. Did you mean 'rephrase_prompt'"):
        load_cases(str(write_jsonl(tmp_path / "cases.jsonl", [case])), {})
