"""Training edits of hyper-networks: from files of both layouts and from benchmarks."""

from __future__ import annotations

import json

import pytest

from edit_hooks import EditingError
from edit_hooks.training.edit_data import EditExample
from lm_edit.mend_data import load_edit_data


def test_data_from_files_of_both_layouts_and_from_benchmarks(tmp_path):
    ours = tmp_path / "ours.jsonl"
    lines = [
        {"prompt": "{} lies in", "subject": "Velm", "target_new": "Rome", "paraphrases": ["Velm is in"]},
        {"prompt": "a b", "target_new": "c", "locality": [{"prompt": "d", "answer": "e"}]},
        {"prompt": "x y", "target_new": "z"},
    ]
    ours.write_text("\n".join(map(json.dumps, lines)))
    data = load_edit_data(str(ours), {}, validation_share=0.34)
    assert data.train[0] == EditExample(prompt="Velm lies in", target="Rome", paraphrases=("Velm is in",))
    assert data.train[1].locality == (("d", "e"),) and [e.prompt for e in data.validation] == ["x y"]
    assert data.report["num_edits"] == 2 and data.report["without_paraphrase"] == 1 and len(data.report["sha256"]) == 64
    zsre = tmp_path / "zsre.json"
    record = {"src": "Who?", "alt": "Ada", "rephrase": "Which one?", "loc": "nq question: when", "loc_ans": "then"}
    zsre.write_text(json.dumps([record, record]))
    (example,) = load_edit_data(str(zsre), {}, validation=str(ours)).train[:1]
    assert example == EditExample(
        prompt="Who?", target="Ada", paraphrases=("Which one?",), locality=(("when", "then"),)
    )
    for benchmark in ("bake", "qaedit"):
        data = load_edit_data(benchmark, {"data": "mini"}, num_edits=20)
        assert len(data.train) == 18 and len(data.validation) == 2 and data.report["without_locality"] == 0


def test_bad_data_is_named(tmp_path):
    with pytest.raises(EditingError, match="Did you mean 'bake'"):
        load_edit_data("bakee", {})
    bad = tmp_path / "bad.jsonl"
    for record, message in (
        ({"prompt": "a"}, "target_new"),
        ({"prompt": "a", "target_new": "b", "locallity": []}, "locallity"),
    ):
        bad.write_text("\n".join([json.dumps({"prompt": "a", "target_new": "b"}), json.dumps(record)]))
        with pytest.raises(EditingError, match=message):
            load_edit_data(str(bad), {})
    bad.write_text(json.dumps({"prompt": "a", "target_new": "b"}))
    with pytest.raises(EditingError, match="validation edits"):
        load_edit_data(str(bad), {})
