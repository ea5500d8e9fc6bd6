"""CounterFact: the flat file is read, checked, and asked the right way round."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl

from edit_hooks.lm.edit_sources import load_edits
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT_FLAT

FILE = "counterfact_flat.jsonl"


def test_a_record_is_one_edit_one_paraphrase_one_neighbor() -> None:
    case = COUNTERFACT_FLAT.load({"data": str(RECORDS / FILE)}).records[0]
    request = case.request
    assert (request.text, request.subject) == ("The mother tongue of Ona Brell is", "Ona Brell")
    assert (request.target_new, request.target_true, request.case_id) == ("Polish", "Danish", "0")
    assert list(case.paraphrases) == [("Ona Brell grew up speaking", "Polish", "Danish")]
    assert list(case.neighbors) == [("Ivo Tarn is a native speaker of", "Danish", "Polish")]  # keeps the true object


def test_neighbors_with_another_object_are_counted(tmp_path: Path) -> None:
    changed = with_field(invented_records(FILE)[0], "locality_ground_truth", "Finnish")
    path = write_jsonl(tmp_path / FILE, [changed, *invented_records(FILE)[1:]])
    loaded = COUNTERFACT_FLAT.load({"data": str(path)})
    assert loaded.source["neighbors_with_another_object"] == 1
    assert loaded.records[0].neighbors[0].wanted == "Finnish"


@pytest.mark.parametrize(
    "field", ["prompt", "subject", "target_new", "ground_truth", "rephrase_prompt", "locality_prompt"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = write_jsonl(tmp_path / FILE, [with_field(invented_records(FILE)[0], field, None)])
    with pytest.raises(EditingError, match=field):
        COUNTERFACT_FLAT.load({"data": str(path)})


def test_a_record_of_the_nested_layout_is_refused(tmp_path: Path) -> None:
    nested = {"case_id": 0, "requested_rewrite": {"prompt": "{} is", "subject": "Ona", "target_new": {"str": "a"}}}
    with pytest.raises(EditingError, match=r"requested_rewrite.*nested layout"):
        COUNTERFACT_FLAT.load({"data": str(write_jsonl(tmp_path / FILE, [nested]))})


def test_offline_the_place_of_the_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EditingError, match=r"counterfact-edit\.json.*put it at"):
        COUNTERFACT_FLAT.load({"data": "hub"})
    with pytest.raises(EditingError, match="data_revision='v1' has no meaning for data=hub"):
        COUNTERFACT_FLAT.load({"data": "hub", "data_revision": "v1"})
    with pytest.raises(EditingError, match=r"no embedded sample.*WanliYoung/Revisit-Editing-Evaluation"):
        COUNTERFACT_FLAT.load({"data": "mini"})


@pytest.mark.realdata
def test_the_published_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = (published_data() / "counterfact" / "counterfact-edit.json").read_bytes()
    pinned = COUNTERFACT_FLAT.source.published
    assert pinned is not None and hashlib.sha256(content).hexdigest() == pinned.sha256
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pinned.cached.parent.mkdir(parents=True)
    pinned.cached.write_bytes(content)
    loaded = COUNTERFACT_FLAT.load({"data": "hub"})
    assert loaded.source["records"] == 10000 and loaded.source["neighbors_with_another_object"] == 0
    assert all(str(case.request.subject) in case.request.text for case in loaded.records)
    assert [edit.key for edit in load_edits("counterfact_flat", {"data": "hub"}, 3)] == [
        case.request.key for case in loaded.records[:3]
    ]
