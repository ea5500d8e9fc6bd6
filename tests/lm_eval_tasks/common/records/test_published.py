"""Published files of a benchmark: hub files at a commit, several in order, Parquet, plain addresses."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from file_server import FileServer, serve_files
from hub_server import serve_hub

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.pinned_file import UrlFile
from lm_eval_tasks.common.records import published
from lm_eval_tasks.common.records.dataset import LoadedRecords, Source, load_records
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.published import HubFile

COMMIT = "c01c" * 10
TOWNS = [{"row": 2, "name": "Velm"}, {"row": 0, "name": "Karsk"}, {"row": 1, "name": "Brenholt"}]


def parquet(records: list[dict[str, Any]]) -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), content)
    return content.getvalue()


FILES = {
    "data/train-0.parquet": parquet(TOWNS[:2]),
    "data/test-0.parquet": parquet(TOWNS[2:]),
    "benchmark/towns/towns.json": json.dumps(TOWNS).encode(),
    "bad.parquet": b"no parquet",
    "empty.parquet": parquet([]),
}
SPLIT = HubFile(repository="someone/towns", paths=list(FILES)[:2], revision=COMMIT, sort_by="row")
NESTED = HubFile(repository="someone/towns", paths=["benchmark/towns/towns.json"])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    published._warn_unpinned.cache_clear()
    with serve_hub(FILES, "someone/towns", COMMIT, tmp_path / "hub", monkeypatch, "main", "v2") as server:
        yield server


def load(file: HubFile | UrlFile, **settings: Any) -> LoadedRecords[str]:
    source = Source(title="Towns", published=file, files=("towns.json",), notes=("row",))
    layout = source.layout(lambda fields, row: f"{row} {fields.text('name')}")
    return load_records(source, {"data": "hub", **settings}, layout)


def test_split_parquet_files_are_one_data_set_in_their_first_order(hub: FileServer) -> None:
    loaded = load(SPLIT)
    assert loaded.records == ["0 Karsk", "1 Brenholt", "2 Velm"]
    expected = {"hub_id": "someone/towns", "revision": COMMIT, "commit": COMMIT, "pinned": True, "records": 3}
    assert expected.items() <= loaded.source.items() and loaded.source["file"] == "train-0.parquet, test-0.parquet"
    assert load(SPLIT).source == loaded.source and hub.requests.total() == 2  # the second time from the cache


def test_without_a_field_to_sort_by_the_files_follow_each_other(hub: FileServer) -> None:
    file = HubFile(repository="someone/towns", paths=list(FILES)[:2], revision=COMMIT)
    assert load(file).records == ["0 Velm", "1 Karsk", "2 Brenholt"]


def test_a_branch_is_read_with_a_warning_that_names_its_commit(
    hub: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
        source = load(NESTED).source
        load(NESTED)
    assert (source["commit"], source["pinned"], source["file"]) == (COMMIT, False, "towns.json")
    (text,) = [record.getMessage() for record in caplog.records]
    assert f"'main' of the Hugging Face dataset someone/towns can change: this run reads commit {COMMIT}" in text
    assert f"data_revision={COMMIT} pins it" in text
    caplog.clear()
    assert load(NESTED, data_revision=COMMIT).source["pinned"] and not caplog.records
    assert load(NESTED, data_revision="v2").source["revision"] == "v2"


def test_files_of_the_hub_are_checked_where_their_digests_are_known(hub: FileServer) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in list(FILES.values())[:2]]
    assert load(replace(SPLIT, sha256=digests)).records == ["0 Karsk", "1 Brenholt", "2 Velm"]
    swapped = replace(SPLIT, sha256=digests[::-1])
    with pytest.raises(EditingError, match=r"train-0\.parquet of .* has another content.*Remove /.*train-0"):
        load(swapped)
    assert len(load(swapped, data_revision="v2").records) == 3  # another revision has other digests


def test_what_the_hub_lacks_is_named_with_the_remedies(hub: FileServer) -> None:
    with pytest.raises(EditingError, match=r"someone/towns \(revision v3\) cannot be reached.*data=/path"):
        load(NESTED, data_revision="v3")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (HubFile(repository="someone/towns", paths=["bad.parquet"]), r"bad\.parquet is no readable Parquet file"),
        (HubFile(repository="someone/towns", paths=["empty.parquet"]), "holds no records"),
        (
            HubFile(repository="someone/towns", paths=list(FILES)[:1], sort_by="name"),
            r"train-0\.parquet, record 0: field 'name' is 'Velm'; the whole number",
        ),
        (HubFile(repository="someone/towns", paths=list(FILES)[:1], sort_by="no"), "field 'no' is None"),
    ],
)
def test_files_that_cannot_be_read_are_named(hub: FileServer, file: HubFile, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        load(file)


def test_a_plain_address_is_recorded_and_its_missing_digest_is_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve_files({"dsets/towns.json": json.dumps(TOWNS).encode()}) as server:
        file = UrlFile(url=f"{server.url}/dsets/towns.json", sha256=None)
        with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
            source = load(file).source
        assert {"url": file.url, "pinned": False, "file": "towns.json", "records": 3}.items() <= source.items()
        assert f"{file.url} can change: its first download is at {file.cached}" in caplog.text
        caplog.clear()
        known = UrlFile(url=file.url, sha256=source["sha256"])
        assert load(known).source["pinned"] is True and not caplog.records
        with pytest.raises(EditingError, match="data_revision='v2' has no meaning for data=hub"):
            load(known, data_revision="v2")


def test_fields_know_what_is_there_without_reading_it() -> None:
    fields = Fields({"a": {"b": None}, "list": [{"c": 1}]}, "place")
    assert fields.has("a") and fields.has("a.b") and not fields.has("a.c") and not fields.has("list.c")
    assert fields.unread() == ["a", "list"] and fields.unread_paths() == {"a", "a.b", "list", "list[].c"}
