"""Records of one benchmark given to another: refused, with the benchmark and the tasks that they belong to."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from record_files import invented_records, published_data, write_jsonl
from task_runs import FOLDER, kept_records, run

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows
from lm_eval_tasks.common.records.benchmark import Benchmark, all_benchmarks
from lm_eval_tasks.common.records.cases import OmittedRecord
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.layouts import Layout, LayoutReader

BENCHMARKS = {benchmark.name: benchmark for benchmark in all_benchmarks().values()}
LEFT_OUT = ["left out by the release"]
PAIRS = list(itertools.permutations(BENCHMARKS, 2))


def unread_by(benchmark: Benchmark[Any], records: list[dict[str, Any]]) -> list[str] | None:
    """The fields that a parser leaves; ``None`` if it refuses a record."""
    unread: set[str] = set()
    for row, record in enumerate(records):
        fields = Fields(record, "place")
        try:
            benchmark.layout.read(fields, row)
        except OmittedRecord:
            return LEFT_OUT
        except EditingError:
            return None
        unread |= fields.unread_paths()
    return sorted(unread)


@pytest.mark.parametrize(("reader", "owner"), PAIRS)
def test_records_of_another_benchmark_are_refused(reader: str, owner: str, tmp_path: Path) -> None:
    """Unless both read the same fields: then they are benchmarks over one file."""
    ours, theirs = BENCHMARKS[reader], BENCHMARKS[owner]
    records = [record for record in kept_records(theirs) if unread_by(ours, [record]) != LEFT_OUT]
    assert unread_by(theirs, records) == [], "the invented records have no field that the benchmark does not declare"
    data = {"data": str(write_jsonl(tmp_path / "records.jsonl", records))}
    if unread_by(ours, records) == []:
        assert ours.load(data).source["records"] == len(records)
        return
    with pytest.raises(EditingError, match="it is a record of") as caught:
        ours.load(data)
    message = str(caught.value)
    assert theirs.source.title in message and f"not of {ours.source.title}" in message
    assert all(group in message for group in theirs.layout.groups)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_named_groups_exist(name: str) -> None:
    for group in BENCHMARKS[name].layout.groups:
        assert [*FOLDER.glob(f"*/_{group}.yaml"), *FOLDER.glob(f"*/{group}.yaml")], group


def test_one_record_of_another_benchmark_among_others_is_named(tmp_path: Path) -> None:
    records = invented_records("bake_judge.json")
    records[1:1] = invented_records("bake_qa.jsonl")[:1]
    data = str(write_jsonl(tmp_path / "records.jsonl", records))
    with pytest.raises(
        EditingError, match=r"record 1 \(line 2\): it is a record of BAKE-Q&J, not of BAKE-J, which has no"
    ):
        run("bake_j_ls", settings={"data": data})
    loaded = BENCHMARKS["bake_j"].load({"data": data, "bad_records": "skip"})
    assert list(loaded.source["skipped"]) == ["records.jsonl, record 1 (line 2)"]


def test_notes_of_the_user_and_damage_do_not_make_a_record_foreign(tmp_path: Path) -> None:
    (record, *_) = invented_records("qaedit.jsonl")
    noted = {**record, "note": {"target_new": "x"}, "requested": "y"}
    assert BENCHMARKS["qaedit"].load({"data": str(write_jsonl(tmp_path / "a.jsonl", [noted]))}).source["records"] == 1
    for field in ("prompt", "target", "subject", "rephrase", "locality"):
        path = write_jsonl(tmp_path / f"{field}.jsonl", [{**record, field: ""}])
        with pytest.raises(EditingError, match=field) as caught:
            BENCHMARKS["qaedit"].load({"data": str(path)})
        assert "record of" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "present", "hint"),
    [
        ("ground_truth", "locality_ground_truth", ""),  # both belong to the layout, and the second one is read later
        ("locality_ground_truth", "ground_truth", ""),  # likewise, and read before
        ("ground_truth", "ground_trut", " Did you mean 'ground_trut'?"),
        ("outer.target", "target_text", ""),  # not in the object that lacks it
        ("outer.target", "outer.targets", " Did you mean 'targets'?"),
        ("outer.target", "outer.target_too", ""),
    ],
)
def test_no_hint_for_a_missing_field_names_one_that_the_layout_reads(missing: str, present: str, hint: str) -> None:
    fields = ("ground_truth", "locality_ground_truth", "target_text", "outer.target", "outer.target_too")
    record: dict[str, Any] = {"outer": {}}
    for path in {*fields, present} - {missing}:
        outer, _, name = path.rpartition(".")
        (record[outer] if outer else record)[name] = "x"
    with pytest.raises(EditingError) as caught:
        read(record, layout("own", *fields))
    assert str(caught.value) == f"place: field {missing!r} is missing.{hint} Add it, or check that the file fits."


# ------------------------------------------------------------------ the rule, on layouts of two or three fields


def layout(title: str, *required: str, optional: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Layout[object]:
    def parse(fields: Fields, row: int) -> object:
        texts = [fields.text(name) for name in required]
        return [*texts, *map(fields.optional, optional)]

    return Layout(title=title, groups=(f"{title}_group",), parse=parse, notes=notes)


def read(record: dict[str, Any], own: Layout[object], *others: Layout[object]) -> object:
    return LayoutReader(own, lambda: [own, *others]).read(Fields(record, "place"), 0)


@pytest.mark.parametrize(
    ("record", "own", "other", "is_foreign"),
    [
        ({"a": "x", "b": "y"}, layout("own", "a"), layout("other", "a", "b"), True),
        ({"a": "x", "b": "y"}, layout("own", "a", optional=("b",)), layout("other", "a", "b"), False),
        ({"a": "x", "b": "y"}, layout("own", "a", notes=("b",)), layout("other", "a", "b"), False),
        # each reads what the other does not: no one knows, and the unread field is named in the warning
        ({"a": "x", "b": "y", "c": "z"}, layout("own", "a", "b"), layout("other", "a", "c"), False),
        ({"a": "x", "b": "y"}, layout("own", "a"), layout("other", "a", "b", "c"), False),
        ({"a": "x", "b": 5}, layout("own", "a"), layout("other", "a", "b"), False),
        ({"b": "y"}, layout("own", "a"), layout("other", "b"), True),
        ({"a": "x"}, layout("own", "a", "b"), layout("other", "a"), True),
        ({"a": 5, "b": "y"}, layout("own", "a"), layout("other", "b"), False),
        ({"n": {"b": "y"}}, layout("own", "a"), layout("other", "n.b"), True),
        ({"n": {"b": "y"}, "a": "x"}, layout("own", "a", "n.c"), layout("other", "a", "n.b"), True),
        ({"a": "x", "b": "y"}, layout("own", "a"), layout("other", "a", notes=("b",)), False),  # anyone's note
        ({"b": "y"}, layout("own", "a"), layout("other"), False),  # accepts anything and reads nothing
    ],
)
def test_the_owner_accepts_the_record_and_reads_more(
    record: dict[str, Any], own: Layout[object], other: Layout[object], is_foreign: bool
) -> None:
    try:
        read(record, own, other)
        message = ""
    except EditingError as error:
        message = str(error)
    assert ("record of other, not of own" in message and "tasks of other_group" in message) == is_foreign, message


def test_the_layout_that_reads_most_is_named_and_ties_are_named_together() -> None:
    record, own = {"a": "x", "b": "y", "c": "z"}, layout("own", "a")
    some, more, all_of_it, twin = (
        layout("some", "a", "b"),
        layout("more", "b", "c", "a"),
        layout("all", "a", "b", "c"),
        layout("twin", "a", "b", "c"),
    )
    with pytest.raises(EditingError, match=r"record of all, not of own, which has no field 'b', 'c'\. Use"):
        read(record, own, some, all_of_it)
    with pytest.raises(EditingError, match="record of more or all or twin, not"):
        read(record, own, some, more, all_of_it, twin)


def test_a_value_that_another_parser_refuses_does_not_hide_later_records() -> None:
    own, other = layout("own", "a"), layout("other", "a", "b")
    reader = LayoutReader(own, lambda: [own, other])
    assert reader.read(Fields({"a": "x", "b": ""}, "place"), 0) == ["x"]  # other refuses the empty text
    with pytest.raises(EditingError, match="record of other"):
        reader.read(Fields({"a": "x", "b": "y"}, "place"), 1)


def test_an_error_inside_of_another_packages_parser_is_no_error_of_this_run() -> None:
    def parse(fields: Fields, row: int) -> object:
        raise ZeroDivisionError

    broken = Layout(title="broken", parse=parse)
    assert read({"a": "x", "b": "y"}, layout("own", "a"), broken) == ["x"]


@pytest.mark.realdata
def test_published_records_that_no_benchmark_claims_wrongly() -> None:
    """Every published file that a benchmark accepts is accepted as its own, with every benchmark asked."""
    folder = published_data()
    files = {"qaedit": "qaedit/QAEdit_inter_1k.json", "counterfact_flat": "counterfact/counterfact-edit.json"}
    for name, file in files.items():
        loaded = BENCHMARKS[name].load({"data": str(folder / file)})
        assert "unknown_fields" not in loaded.source and isinstance(loaded.records[0].request, EditRequest)
        rows = [record for _, record in read_rows(folder / file)][:5]
        for other in BENCHMARKS.values():
            left = unread_by(other, rows)
            assert other.name == name or left is None or left
