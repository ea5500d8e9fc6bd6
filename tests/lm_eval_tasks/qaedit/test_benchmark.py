"""QAEdit's records: the published schema, unusual records, and published data where it is available."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_QJ
from lm_eval_tasks.common.records import benchmark
from lm_eval_tasks.common.records.dataset import LoadedRecords
from lm_eval_tasks.qaedit.benchmark import QAEDIT

INVENTED = {"data": str(RECORDS / "qaedit.jsonl")}


def test_records_are_read_as_published_with_the_first_locality_pair_only() -> None:
    first, second, *_ = QAEDIT.load(INVENTED).records
    assert first.neighbors == [("when did the salt canal open", "1874", None)]
    assert [question.wanted for question in first.paraphrases] == [first.request.target_new]
    assert second.request.target_new == "St. Brannock"
    assert (second.request.case_id, second.extras) == ("1", {"source_id": "7", "origin": "TQA"})


def test_unusual_records_are_counted() -> None:
    source = QAEDIT.load(INVENTED).source
    assert source["duplicate_ids"] == 1
    assert (source["targets_with_inner_period"], source["targets_empty_when_normalized"]) == (1, 1)
    assert source["neighbors_that_are_edits"] == 0


def test_locality_questions_that_another_row_edits_are_counted(tmp_path: Path) -> None:
    """In another case and with a question mark, as in the published rows."""
    first, second, *others = invented_records("qaedit.jsonl")
    edited = second["prompt"].rstrip("?").upper()
    first = with_field(first, "locality", [{"loc": edited, "loc_ans": "x"}, *first["locality"]])
    loaded = QAEDIT.load({"data": str(write_jsonl(tmp_path / "q.jsonl", [first, second, *others]))})
    assert loaded.source["neighbors_that_are_edits"] == 1


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("prompt", None, "'prompt' is missing"),
        ("subject", "Nobody", "'Nobody' does not occur in prompt"),
        ("target", "", "'target' is empty"),
        ("rephrase", None, "'rephrase' is missing"),
        ("locality", [], "a non-empty list of objects is needed"),
        ("locality", [{"loc": "x"}], "locality[0]: field 'loc_ans' is missing"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("qaedit.jsonl")
    records[1] = with_field(records[1], path, value)
    with pytest.raises(EditingError) as caught:
        QAEDIT.load({"data": str(write_jsonl(tmp_path / "q.jsonl", records))})
    assert "q.jsonl, record 1 (line 2)" in str(caught.value) and problem in str(caught.value)


@pytest.mark.realdata
def test_published_rows() -> None:
    loaded = QAEDIT.load({"data": str(published_data() / "qaedit")})
    assert loaded.source["file"] == "QAEdit_inter_1k.json"
    assert loaded.source["records"] == 1000
    assert loaded.source["duplicate_ids"] == 39
    assert loaded.source["neighbors_that_are_edits"] == 7
    assert loaded.source["targets_with_inner_period"] == 46  # 47 and 37 before outer white space is dropped
    assert loaded.source["targets_ending_in_period"] == 38
    assert loaded.source["targets_empty_when_normalized"] == 1
    assert all(case.request.subject in case.request.text for case in loaded.records)
    assert Counter(case.extras["origin"] for case in loaded.records) == {"NQ": 247, "TQA": 364, "SQA": 389}


@pytest.mark.realdata
def test_the_set_of_sequential_editing_is_the_published_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`data=hub:inter_1k` gives tasks and streams the 1,000 rows, not the first 1,000 of the full file."""
    published = (published_data() / "qaedit" / "QAEdit_inter_1k.json").read_bytes()
    pinned = QAEDIT.source.sets["inter_1k"]
    assert hashlib.sha256(published).hexdigest() == pinned.sha256
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pinned.cached.parent.mkdir(parents=True)
    pinned.cached.write_bytes(published)
    loaded = QAEDIT.load({"data": "hub:inter_1k"})
    assert (loaded.source["records"], loaded.source["file"]) == (1000, "QAEdit_inter_1k.json")
    edits = load_edits("qaedit", {"data": "hub:inter_1k"}, 1000)
    assert [edit.key for edit in edits] == [case.request.key for case in loaded.records]


def test_another_benchmark_reads_its_own_data_beside_a_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        benchmark, "load_records", lambda source, settings, *layouts: LoadedRecords([], {"read": settings})
    )
    assert BAKE_QJ.load({"data": "hub:inter_1k"}).source["read"]["data"] == "hub"
    assert "data=hub:inter_1k is a set of QAEdit; BAKE-Q&J uses data=hub" in caplog.text
    assert BAKE_QJ.load({"data": "hub:unknown"}).source["read"]["data"] == "hub:unknown"  # refused by the loader
    assert QAEDIT.load({"data": "mini:held_out"}).source["read"]["data"] == "mini"
    assert BAKE_QJ.load({"data": "mini:held_out"}).source["read"]["data"] == "mini:held_out"


def test_held_out_facts_are_a_set_of_the_embedded_sample() -> None:
    loaded = BAKE_QJ.load({"data": "mini:held_out"})
    assert (loaded.source["data"], loaded.source["file"]) == ("mini:held_out", "held_out.jsonl")
    with pytest.raises(EditingError, match=r"no set 'held_uot'.*Did you mean 'held_out'.*mini, mini:held_out"):
        BAKE_QJ.load({"data": "mini:held_uot"})
