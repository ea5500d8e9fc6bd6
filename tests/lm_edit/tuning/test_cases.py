"""Cases to tune on: those of a benchmark, and those of a file."""

from __future__ import annotations

import pytest
from record_files import write_jsonl

from edit_hooks.utils.errors import EditingError
from lm_edit.tuning.cases import load_cases
from lm_eval_tasks.common.records.cases import Question

REQUEST = {"prompt": "{} is located in", "subject": "Port Amelin", "target_new": "Rome", "target_true": "Brenholt"}
RECORD = {
    "request": REQUEST,
    "paraphrases": ["The harbour of Port Amelin lies in"],
    "neighbors": [{"prompt": "Velm is in", "answer": "Ostravia"}],
}


def test_benchmarks_give_their_paraphrases_and_neighbors():
    bake = load_cases("bake", {})
    assert len(bake) > 20 and bake[0].neighbors[0].other == bake[0].request.target_new
    assert bake[0].paraphrases[0].wanted == bake[0].request.target_new
    qaedit = load_cases("qaedit", {})
    assert qaedit[0].neighbors[0].other is None and len(qaedit[0].paraphrases) == 1


def test_a_file_gives_cases(tmp_path):
    (case,) = load_cases(str(write_jsonl(tmp_path / "cases.jsonl", [RECORD])), {})
    assert case.request.text == "Port Amelin is located in"
    assert case.neighbors == [Question("Velm is in", "Ostravia")]
    assert case.paraphrases == [Question("The harbour of Port Amelin lies in", "Rome", "Brenholt")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (REQUEST, r"record 0.*a plain edit request has no prompts that must stay unchanged"),
        (["x"], "a case to tune on is"),
        ({**RECORD, "neighbors": [{"prompt": "x"}]}, r"record 0 \(line 1\), neighbors\[0\]: field 'answer' is missing"),
        ({**RECORD, "neighbors": []}, "a non-empty list of objects is needed"),
        ({**RECORD, "request": {"prompt": "x"}}, "target_new"),
    ],
)
def test_records_that_violate_the_layout_are_named(tmp_path, record, message):
    path = write_jsonl(tmp_path / "cases.jsonl", [record])
    with pytest.raises(EditingError, match=message):
        load_cases(str(path), {})


def test_an_unknown_benchmark_has_near_misses_and_the_layout_of_a_file():
    with pytest.raises(EditingError, match=r"Did you mean 'bake'.*neighbors"):
        load_cases("bakee", {})
