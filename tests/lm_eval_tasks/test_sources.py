"""Loaders: three places data can come from, every record checked, and errors that say where and what to do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import REAL_DATA, RECORDS

import lm_eval_tasks.bake.records as bake
import lm_eval_tasks.qaedit.records as qaedit
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.options import switch
from lm_eval_tasks.common.benchmarks import BENCHMARKS, load_edit_requests
from lm_eval_tasks.common.dataset import Source, load, read_rows, which_data
from lm_eval_tasks.common.fields import Fields


@pytest.fixture
def shared_data() -> Path:
    """Folder with published data files; tests that need them are skipped where it does not exist."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no published data at {REAL_DATA}; set LM_EDIT_SHARED_DATA to run this")
    return REAL_DATA


def write(path: Path, records: list[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def invented(name: str) -> list[dict[str, Any]]:
    """Records of a file in tests/records, to be bent by a test."""
    return [record for _, record in read_rows(RECORDS / name)]


# ------------------------------------------------------------------ which data


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
def test_sample_without_a_model_published_data_with_one(settings: dict[str, Any], expected: str) -> None:
    assert which_data(settings) == expected


@pytest.mark.parametrize("data", [3, "", True, []])
def test_data_that_is_no_place_is_an_error(data: Any) -> None:
    with pytest.raises(EditingError, match="Ways out"):
        which_data({"data": data})


def test_unreachable_hub_names_the_three_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EditingError) as caught:
        bake.load_records({"pretrained": "some/model"}, "qa")
    for words in ("BAKE_qa.json", "jym7/BAKE", "data=mini", "data=/path", "network"):
        assert words in str(caught.value)


def test_hub_data_records_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, filename: str, *, repo_type: str, revision: str) -> str:
        asked.update(repo_id=repo_id, filename=filename, repo_type=repo_type, revision=revision)
        folder = tmp_path / "snapshots" / "0123abcd"
        folder.mkdir(parents=True)
        return str(write(folder / filename, invented("qaedit.jsonl")))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = qaedit.load_records({"data": "hub", "data_revision": "v2", "revision": "of-the-model"})
    assert asked == {"repo_id": "WenDingY/QAEdit", "filename": "QAEdit.json", "repo_type": "dataset", "revision": "v2"}
    assert loaded.source["commit"] == "0123abcd"
    assert loaded.source["revision"] == "v2"


def test_a_folder_is_searched_for_the_known_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "BAKE_qa.jsonl", invented("bake_qa.jsonl"))
    loaded = bake.load_records({"data": str(tmp_path)}, "qa")
    assert (loaded.source["file"], loaded.source["records"]) == ("BAKE_qa.jsonl", 4)
    assert len(loaded.source["sha256"]) == 64
    with pytest.raises(EditingError, match=r"QAEdit\.json, QAEdit_inter_1k\.json"):
        qaedit.load_records({"data": str(tmp_path)})
    with pytest.raises(EditingError, match="neither mini, hub, a file nor a folder"):
        qaedit.load_records({"data": str(tmp_path / "absent")})
    with pytest.raises(EditingError, match="Did you mean 'mini'"):
        qaedit.load_records({"data": "mimi"})


def test_a_benchmark_without_a_sample_says_so(tmp_path: Path) -> None:
    source = Source(name="Some", hub_id="a/b", files=("some.json",), mini=tmp_path / "mini.jsonl")
    with pytest.raises(EditingError, match=r"no embedded sample.*data=hub or data=/path"):
        load(source, {}, lambda record, row, where: record)


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


# ------------------------------------------------------------------ schema


def test_bake_records_are_read_as_published() -> None:
    first, _, third, fourth = bake.load_records({"data": str(RECORDS / "bake_qa.jsonl")}, "qa").records
    assert first.request.text == "Port Elna is the capital of"
    assert (first.request.target_new, first.request.target_true) == ("Dravonia", "Ostmark")
    assert first.reverse_qa == ("The capital of Dravonia is", "Port Elna", "Veldt")
    assert first.reverse_judge[1:] == ("yes", "no")
    assert third.request.target_true == "Nell Dalen"  # outer white space of targets is dropped
    assert (third.request.case_id, third.source_id) == ("2", "1")  # the row, although the file repeats id 1
    assert third.paraphrases == [] and fourth.neighbors == []
    assert fourth.paraphrases == ["The product made by Fernhill Ltd is"]  # a blank prompt is never asked


def test_counts_of_odd_rows_go_to_the_source() -> None:
    source = bake.load_records({"data": str(RECORDS / "bake_qa.jsonl")}, "qa").source
    assert (source["without_paraphrases"], source["without_neighbors"], source["blank_prompts"]) == (1, 1, 1)
    source = qaedit.load_records({"data": str(RECORDS / "qaedit.jsonl")}).source
    assert source["duplicate_ids"] == 1
    assert (source["targets_with_inner_period"], source["targets_empty_when_normalized"]) == (1, 1)


def test_qaedit_uses_the_first_locality_pair_only() -> None:
    first, second, *_ = qaedit.load_records({"data": str(RECORDS / "qaedit.jsonl")}).records
    assert (first.locality_question, first.locality_answer) == ("when did the salt canal open", "1874")
    assert second.request.target_new == "St. Brannock"
    assert (second.request.case_id, second.source_id, second.origin) == ("1", "7", "TQA")


def bend(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a record with one field replaced, or removed by ``None``."""
    bent = json.loads(json.dumps(record))
    *parents, last = path.split(".")
    inner = bent
    for step in parents:
        inner = inner[step]
    inner.pop(last)
    if value is not None:
        inner[last] = value
    return bent


BAKE_FAULTS = [
    ("requested_rewrite.prompt", None, "'requested_rewrite.prompt' is missing"),
    ("requested_rewrite.subject", "Someone", "has no {} slot|Someone"),
    ("requested_rewrite.target_new.str", "  ", "is empty"),
    ("requested_rewrite.target_true", "Norvania", "'requested_rewrite.target_true.str' is missing"),
    ("paraphrase_prompts", "one prompt", "a list of texts is needed"),
    ("neighborhood_prompts", [1], "a list of texts is needed"),
    ("reverse_qa", None, "'reverse_qa.prompt' is missing"),
    ("reverse_judge.prompt", 7, "7 (int); a text is needed"),
]


@pytest.mark.parametrize(("path", "value", "problem"), BAKE_FAULTS)
def test_bake_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented("bake_qa.jsonl")
    if path == "requested_rewrite.subject":
        records[2]["requested_rewrite"]["prompt"] = "The spouse of Ruk Dalen is"  # plain: the subject must occur
    records[2] = bend(records[2], path, value)
    with pytest.raises(EditingError) as caught:
        bake.load_records({"data": str(write(tmp_path / "BAKE_qa.jsonl", records))}, "qa")
    message = str(caught.value)
    assert "1 of 4 records" in message and "BAKE_qa.jsonl, record 2" in message and "bad_records=skip" in message
    assert any(part in message for part in problem.split("|"))


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("prompt", None, "'prompt' is missing"),
        ("subject", "Nobody", "'Nobody' does not occur in prompt"),
        ("target", "", "'target' is empty"),
        ("rephrase", None, "'rephrase' is missing"),
        ("locality", [], "a non-empty list of objects is needed"),
        ("locality", [{"loc": "x"}], "'loc_ans' is missing"),
    ],
)
def test_qaedit_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented("qaedit.jsonl")
    records[1] = bend(records[1], path, value)
    with pytest.raises(EditingError) as caught:
        qaedit.load_records({"data": str(write(tmp_path / "q.jsonl", records))})
    assert "q.jsonl, record 1 (line 2)" in str(caught.value) and problem in str(caught.value)


def test_all_records_are_checked_and_the_first_few_problems_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"promt": "x"}] * 8 + ["text"])
    with pytest.raises(EditingError) as caught:
        qaedit.load_records({"data": str(path)})
    message = str(caught.value)
    assert "9 of 9 records" in message and "and 4 more" in message and "Did you mean" not in message.split("\n")[0]
    assert "'prompt' is missing. Did you mean 'promt'?" in message


def test_skipping_bad_records_is_counted(tmp_path: Path) -> None:
    records = invented("qaedit.jsonl")
    del records[0]["target"]
    path = str(write(tmp_path / "q.jsonl", records))
    loaded = qaedit.load_records({"data": path, "bad_records": "skip"})
    assert loaded.source["records"] == 3
    assert list(loaded.source["skipped"]) == ["q.jsonl, record 0 (line 1)"]
    assert [record.request.case_id for record in loaded.records] == ["1", "2", "3"]  # rows keep their numbers
    with pytest.raises(EditingError, match="Did you mean 'skip'"):
        qaedit.load_records({"data": path, "bad_records": "skp"})
    with pytest.raises(EditingError, match="1 of 1 records"):
        qaedit.load_records({"data": str(write(tmp_path / "q.jsonl", records[:1])), "bad_records": "skip"})


def test_bake_j_needs_no_reverse_question() -> None:
    loaded = bake.load_records({"data": str(RECORDS / "bake_judge.json")}, "judge")
    assert [record.reverse_qa for record in loaded.records] == [None, None]
    with pytest.raises(EditingError, match=r"'reverse_qa\.prompt' is missing"):
        bake.load_records({"data": str(RECORDS / "bake_judge.json")}, "qa")


@pytest.mark.parametrize(
    ("template", "prompt", "options"),
    [
        ("raw", "Whether the capital of Dravonia is Port Elna?", ("yes", "no")),
        (
            "correct",
            "The capital of Dravonia is Port Elna, is the information described in this sentence correct?",
            ("yes, it is true", "no, it is false"),
        ),
        (
            "true",
            "The capital of Dravonia is Port Elna, is the information described in this sentence true?",
            ("yes, it is true", "no, it is false"),
        ),
    ],
)
def test_judge_templates(template: str, prompt: str, options: tuple[str, str]) -> None:
    record = bake.load_records({"data": str(RECORDS / "bake_qa.jsonl")}, "qa").records[0]
    assert bake.judge_question(record, template) == (prompt, *options)


def test_judge_statement_without_a_reverse_question() -> None:
    record = bake.load_records({"data": str(RECORDS / "bake_judge.json")}, "judge").records[1]
    assert bake.statement(record) == "Curling is the sport played by Ina Holt"
    # no space before the statement, as published
    assert "wrong:Curling is the sport played by Ina Holt. Is" in bake.judge_question(record, "instruction").prompt


def test_unknown_settings_values_are_errors_before_any_data_is_read() -> None:
    with pytest.raises(EditingError, match=r"judge_template='corect' is unknown\. Did you mean 'correct'"):
        bake.load_records({"data": "nowhere", "judge_template": "corect"}, "qa")
    with pytest.raises(EditingError, match="wild_context='chat' is unknown"):
        qaedit.load_records({"data": "nowhere", "wild_context": "chat"})


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("false", False), ("True", True), (None, "error")])
def test_switches(value: Any, expected: Any) -> None:
    if expected == "error":
        with pytest.raises(EditingError, match="Accepted: true, false"):
            switch({"generate": value}, "generate", True)
    else:
        assert switch({"generate": value}, "generate", True) is expected


def test_fields_report_where_they_are() -> None:
    fields = Fields({"a": {"b": 1}}, "f.json, record 3")
    with pytest.raises(EditingError, match=r"f\.json, record 3: field 'a\.b' is 1 \(int\); a text is needed"):
        fields.text("a.b")
    with pytest.raises(EditingError, match=r"field 'a\.b\.c' is missing"):
        fields.text("a.b.c")


# ------------------------------------------------------------------ edits alone


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_edit_requests_of_every_benchmark(benchmark: str) -> None:
    names = {"qaedit": "qaedit.jsonl", "bake_j": "bake_judge.json", "bake": "bake_qa.jsonl"}
    name = next(names[prefix] for prefix in names if benchmark.startswith(prefix))
    requests = load_edit_requests(benchmark, {"data": str(RECORDS / name)})
    assert [request.case_id for request in requests] == [str(row) for row in range(len(requests))]
    assert len({request.key for request in requests}) == len(requests) == len(invented(name))


def test_edit_requests_of_an_unknown_benchmark() -> None:
    with pytest.raises(EditingError, match="Did you mean 'qaedit'"):
        load_edit_requests("qaedits", {})


# ------------------------------------------------------------------ embedded and published data


@pytest.mark.parametrize(("module", "subset"), [(bake, "qa"), (qaedit, None)])
def test_the_embedded_samples_are_valid(module: Any, subset: str | None) -> None:
    loaded = module.load_records({}, subset)
    assert loaded.source["data"] == "mini"
    assert loaded.source["records"] == len(loaded.records) > 0
    assert len({record.request.key for record in loaded.records}) == len(loaded.records)


@pytest.mark.realdata
def test_published_qaedit_rows(shared_data: Path) -> None:
    loaded = qaedit.load_records({"data": str(shared_data)})
    assert loaded.source["file"] == "QAEdit_inter_1k.json"
    assert loaded.source["records"] == 1000
    assert loaded.source["duplicate_ids"] == 39
    assert loaded.source["targets_with_inner_period"] == 46  # 47 and 37 before outer white space is dropped
    assert loaded.source["targets_ending_in_period"] == 38
    assert loaded.source["targets_empty_when_normalized"] == 1
    counts: dict[str | None, int] = {}
    for record in loaded.records:
        counts[record.origin] = counts.get(record.origin, 0) + 1
        assert record.request.subject in record.request.text
    assert counts == {"NQ": 247, "TQA": 364, "SQA": 389}


@pytest.mark.realdata
def test_bake_schema_fixtures(shared_data: Path) -> None:
    qa = bake.load_records({"data": str(shared_data / "bake" / "fixture_INVENTED_qa.json")}, "qa")
    judge = bake.load_records({"data": str(shared_data / "bake" / "fixture_INVENTED_judge.json")}, "judge")
    assert (len(qa.records), len(judge.records)) == (6, 4)
    assert qa.source["without_paraphrases"] + qa.source["without_neighbors"] >= 2
    assert all(record.reverse_qa is not None for record in qa.records)


def test_a_file_of_another_benchmark_leaves_this_one_its_default(tmp_path, caplog):
    """One command may ask two benchmarks and bring the data of one of them."""
    file = tmp_path / "QAEdit_inter_1k.json"
    rows = [json.loads(line) for line in (RECORDS / "qaedit.jsonl").read_text().splitlines()]
    file.write_text(json.dumps(rows))
    with caplog.at_level(logging.WARNING):
        loaded = bake.load_records({"data": str(file)}, "qa")
    assert loaded.source["data"] == "mini" and "is QAEdit's file" in caplog.text
    assert len(qaedit.load_records({"data": str(file)}).records) == len(rows)
    renamed = file.rename(tmp_path / "something.json")
    with pytest.raises(EditingError, match="cannot be used"):
        bake.load_records({"data": str(renamed)}, "qa")
