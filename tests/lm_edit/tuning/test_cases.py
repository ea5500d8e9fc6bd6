"""Cases to tune on: those of a benchmark, and those of a file."""

from __future__ import annotations

import pytest
from paths import RECORDS
from record_files import write_jsonl

from edit_hooks.utils.errors import EditingError
from lm_edit.tuning.cases import load_cases
from lm_eval_tasks.common.records.cases import Question

REQUEST = {"prompt": "{} is located in", "subject": "Port Amelin", "target_new": "Rome", "target_true": "Brenholt"}
FACT = {
    **REQUEST,
    "rephrase_prompt": "The harbour of Port Amelin lies in",
    "locality_prompt": ["Velm is in"],
    "locality_ground_truth": ["Ostravia"],
}


def test_benchmarks_give_their_paraphrases_and_neighbors():
    bake = load_cases("bake", {})
    assert len(bake) > 20 and bake[0].neighbors[0].other == bake[0].request.target_new
    assert bake[0].paraphrases[0].wanted == bake[0].request.target_new
    qaedit = load_cases("qaedit", {})
    assert qaedit[0].neighbors[0].other is None and len(qaedit[0].paraphrases) == 1


def test_a_file_gives_cases(tmp_path):
    event = {name: value for name, value in FACT.items() if name != "target_true"}
    case, new = load_cases(str(write_jsonl(tmp_path / "cases.jsonl", [FACT, event])), {})
    assert case.request.text == "Port Amelin is located in" and new.request.target_true is None
    assert case.neighbors == new.neighbors == [Question("Velm is in", "Ostravia", "Rome")]
    assert case.paraphrases == [Question("The harbour of Port Amelin lies in", "Rome", "Brenholt")]


def test_a_file_of_another_benchmark_gives_that_ones_cases():
    file = str(RECORDS / "bake_qa.jsonl")
    assert load_cases(file, {}) == load_cases("bake", {"data": file})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("x", "record 0.*: the record is a str; an object is needed"),
        (
            {**FACT, "locality_ground_truth": []},
            r"record 0 \(line 1\): field 'locality_ground_truth' has 0 answers for 1",
        ),
        ({"prompt": "x"}, "field 'target_new' is missing"),
    ],
)
def test_records_that_violate_the_layout_are_named(tmp_path, record, message):
    path = write_jsonl(tmp_path / "cases.jsonl", [record])
    with pytest.raises(EditingError, match=message):
        load_cases(str(path), {})


def test_an_unknown_benchmark_has_near_misses_and_what_a_file_may_be():
    with pytest.raises(EditingError, match=r"Did you mean 'bake'.*a JSON or JSONL file of facts"):
        load_cases("bakee", {})
