"""QAEdit's records: the published schema, unusual records, and published data where it is available."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.utils.errors import EditingError
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
    assert loaded.source["targets_with_inner_period"] == 46  # 47 and 37 before outer white space is dropped
    assert loaded.source["targets_ending_in_period"] == 38
    assert loaded.source["targets_empty_when_normalized"] == 1
    assert all(case.request.subject in case.request.text for case in loaded.records)
    assert Counter(case.extras["origin"] for case in loaded.records) == {"NQ": 247, "TQA": 364, "SQA": 389}
