"""Records from the sample, the hub or a path; every record is checked, and errors name place and remedy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_files import write_jsonl

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows
from edit_hooks.utils.storage.pinned_file import PinnedFile
from lm_eval_tasks.common.records.dataset import LoadedRecords, Source, choose_data, load_records
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.settings import Settings

RECORDS = [{"name": "Velm"}, {"name": "Karsk"}, {"name": "Brenholt"}]


def parse(fields: Fields, row: int) -> tuple[int, str]:
    return row, fields.text("name")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    sample = write_jsonl(tmp_path / "mini.jsonl", RECORDS[:1])
    return Source(title="Towns", hub_id="someone/towns", files=("towns.json", "towns.jsonl"), mini=sample)


def load(source: Source, settings: Settings) -> LoadedRecords[tuple[int, str]]:
    return load_records(source, settings, source.layout(parse))


# ------------------------------------------------------------------ choice of the data


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "mini"),
        ({"pretrained": "some/model"}, "hub"),
        ({"pretrained": "some/model", "data": "mini"}, "mini"),
        ({"data": "hub"}, "hub"),
        ({"data": "folder/x.json"}, "folder/x.json"),
    ],
)
def test_default_is_the_sample_without_a_model_and_the_hub_with_one(settings: dict[str, Any], expected: str) -> None:
    assert choose_data(settings) == expected


@pytest.mark.parametrize("data", [3, "", True, []])
def test_data_of_the_wrong_type_is_an_error(data: Any) -> None:
    with pytest.raises(EditingError, match="Use data=mini"):
        choose_data({"data": data})


def test_unreachable_hub_names_the_three_remedies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Source
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EditingError) as caught:
        load(source, {"pretrained": "some/model"})
    for words in ("towns.json", "someone/towns", "data=mini", "data=/path", "network"):
        assert words in str(caught.value)


def test_hub_data_records_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Source) -> None:
    downloads: list[dict[str, Any]] = []

    def download(repo_id: str, filename: str, *, repo_type: str, revision: str) -> str:
        downloads.append({"repo_id": repo_id, "filename": filename, "repo_type": repo_type, "revision": revision})
        folder = tmp_path / "snapshots" / "0123abcd"
        folder.mkdir(parents=True)
        return str(write_jsonl(folder / filename, RECORDS))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = load(source, {"data": "hub", "data_revision": "v2", "revision": "of-the-model"})
    expected = {"repo_id": "someone/towns", "filename": "towns.json", "repo_type": "dataset", "revision": "v2"}
    assert downloads == [expected]
    assert (loaded.source["commit"], loaded.source["revision"]) == ("0123abcd", "v2")


@pytest.fixture
def with_a_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Source) -> Source:
    """The source with a pinned set of two towns, which is in the cache already."""
    content = json.dumps(RECORDS[1:]).encode()
    pinned = PinnedFile(
        repository="someone/release", commit="c" * 40, path="data/two.json", sha256=hashlib.sha256(content).hexdigest()
    )
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pinned.cached.parent.mkdir(parents=True)
    pinned.cached.write_bytes(content)
    return dataclasses.replace(source, sets={"two": pinned})


def test_a_published_set_is_its_pinned_file(with_a_set: Source) -> None:
    loaded = load(with_a_set, {"data": "hub:two", "data_revision": "main"})
    assert [name for _, name in loaded.records] == ["Karsk", "Brenholt"]
    place = {"data": "hub:two", "repository": "someone/release", "commit": "c" * 40, "file": "two.json"}
    assert place.items() <= loaded.source.items()
    assert loaded.source["sha256"] == with_a_set.sets["two"].sha256


def test_a_set_that_does_not_exist_or_with_a_revision_is_an_error(with_a_set: Source) -> None:
    with pytest.raises(EditingError, match=r"Did you mean 'two'.*Accepted: hub, hub:two"):
        load(with_a_set, {"data": "hub:tow"})
    with pytest.raises(EditingError, match="data_revision='v2' has no meaning"):
        load(with_a_set, {"data": "hub:two", "data_revision": "v2"})


def test_a_folder_is_searched_for_the_accepted_file_names(tmp_path: Path, source: Source) -> None:
    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "deep" / "towns.jsonl", RECORDS)
    loaded = load(source, {"data": str(tmp_path)})
    assert (loaded.source["file"], loaded.source["records"]) == ("towns.jsonl", 3)
    assert len(loaded.source["sha256"]) == 64
    (tmp_path / "empty").mkdir()
    with pytest.raises(EditingError, match=r"no file of Towns .*towns\.json, towns\.jsonl"):
        load(source, {"data": str(tmp_path / "empty")})
    with pytest.raises(EditingError, match="neither mini, hub, a file nor a folder"):
        load(source, {"data": str(tmp_path / "absent")})
    with pytest.raises(EditingError, match="Did you mean 'mini'"):
        load(source, {"data": "mimi"})


def test_a_benchmark_without_a_sample_names_the_alternatives() -> None:
    source = Source(title="Some", hub_id="a/b", files=("some.json",))
    with pytest.raises(EditingError, match=r"Some has no embedded sample.*data=hub or data=/path"):
        load(source, {})


# ------------------------------------------------------------------ malformed files


def test_malformed_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n', encoding="utf-8")
    with pytest.raises(EditingError, match=r"x\.jsonl, line 3"):
        read_rows(path)
    path.write_text('[\n {"a": 1},\n {"a" 2}\n]', encoding="utf-8")
    with pytest.raises(EditingError, match=r"x\.jsonl, line 3, column 7"):
        read_rows(path)


@pytest.mark.parametrize("content", [b"", b" \n\n", b"[]"])
def test_a_file_without_records_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(EditingError, match="holds no records"):
        read_rows(path)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[\xff\xfe]")
    with pytest.raises(EditingError, match="not UTF-8"):
        read_rows(path)


@given(st.lists(st.dictionaries(st.text(), st.text()), min_size=1, max_size=4))
def test_list_and_lines_read_the_same(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "list.json").write_text("\ufeff" + json.dumps(records, ensure_ascii=False), encoding="utf-8")
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (folder / "lines.jsonl").write_text(lines, encoding="utf-8")
    assert [row for _, row in read_rows(folder / "list.json")] == records
    assert [row for _, row in read_rows(folder / "lines.jsonl")] == records


# ------------------------------------------------------------------ bad records


def test_all_records_are_checked_and_the_first_few_problems_listed(tmp_path: Path, source: Source) -> None:
    reasons = [{"name": number} for number in range(6)]
    path = write_jsonl(tmp_path / "x.jsonl", [{"nome": "x"}] * 8 + ["text", *reasons])
    with pytest.raises(EditingError) as caught:
        load(source, {"data": str(path)})
    first, missing, text, *others, last = str(caught.value).splitlines()
    assert first.endswith("15 of 15 records cannot be used:")
    assert missing.startswith("x.jsonl, record 0 (line 1): field 'name' is missing. Did you mean 'nome'?")
    assert missing.endswith(" (7 more like it)")  # the same reason is named once
    assert text == "x.jsonl, record 8 (line 9): the record is a str; an object is needed." and len(others) == 3
    assert last == "... and 3 further reasons"  # no advice to skip all records
    write_jsonl(path, [*RECORDS, {}])
    with pytest.raises(
        EditingError, match=r"(?s)1 of 4 records.*bad_records=skip \(lm-edit: --bad-records skip\)"
    ) as caught:
        load(source, {"data": str(path)})
    assert len(str(caught.value).splitlines()) == 3


def test_skipped_records_are_counted_and_rows_keep_their_numbers(tmp_path: Path, source: Source) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [{}, *RECORDS]))
    loaded = load(source, {"data": path, "bad_records": "skip"})
    assert loaded.source["records"] == 3
    assert list(loaded.source["skipped"]) == ["x.jsonl, record 0 (line 1)"]
    assert loaded.records == [(1, "Velm"), (2, "Karsk"), (3, "Brenholt")]
    with pytest.raises(EditingError, match="Did you mean 'skip'"):
        load(source, {"data": path, "bad_records": "skp"})
    with pytest.raises(EditingError, match="1 of 1 records"):
        load(source, {"data": str(write_jsonl(tmp_path / "y.jsonl", [{}])), "bad_records": "skip"})
