"""Random subsets: one order for tasks and edits, defined by seed and row alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from record_files import invented_records, write_jsonl
from task_runs import build, manager

from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.records.subsets import choose_subset

ROWS = list(range(8))
# sha256sum of "0:0" starts with ac72, "0:1" ef13, 9328, 76d3, 48f0, cc0c, a79a, "0:7" 2bef: ascending 7, 4, 3, ...
ORDER_OF_SEED_0 = [7, 4, 3, 2, 6, 0, 5, 1]
# "1:0" a668, d6b5, 673a, 85f2, 492a, 6669, 6232, "1:7" 3d5f
ORDER_OF_SEED_1 = [7, 4, 6, 5, 2, 3, 0, 1]


def order(seed: int, rows: list[int]) -> list[int]:
    """The definition, written down once more."""
    return sorted(rows, key=lambda row: hashlib.sha256(f"{seed}:{row}".encode()).hexdigest())


def rows_of(**settings: Any) -> list[int]:
    positions, _ = choose_subset(ROWS, settings, "it")
    return [ROWS[position] for position in positions]


def test_the_order_is_the_one_of_every_python_version() -> None:
    assert rows_of(subset="all", subset_seed=0) == ORDER_OF_SEED_0
    assert rows_of(subset="all", subset_seed=1) == ORDER_OF_SEED_1


def test_a_subset_is_the_start_of_the_shuffle_and_of_larger_subsets() -> None:
    assert [rows_of(subset=size) for size in (1, 3, 8)] == [ORDER_OF_SEED_0[:size] for size in (1, 3, 8)]
    assert rows_of(subset=3, subset_seed=1) == ORDER_OF_SEED_1[:3]


def test_without_the_settings_the_order_is_that_of_the_file() -> None:
    assert rows_of() == rows_of(subset="all") == rows_of(subset=None, subset_seed=None) == ROWS
    assert choose_subset(ROWS, {}, "it")[1] == {}
    assert rows_of(subset_seed=1) == ORDER_OF_SEED_1
    assert choose_subset(ROWS, {"subset_seed": 1}, "it")[1] == {"subset": "all", "subset_seed": 1, "subset_of": 8}


def test_the_rest_of_the_file_does_not_matter() -> None:
    """A row that is left out does not change the order of the others."""
    positions, _ = choose_subset([0, 2, 5], {"subset": 3, "subset_seed": 1}, "it")
    assert [[0, 2, 5][position] for position in positions] == [row for row in ORDER_OF_SEED_1 if row in (0, 2, 5)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subset": 9}, r"subset=9, but it has 8 records. Give at most that, or subset=all"),
        ({"subset": 0}, "a whole number >= 1 is needed"),
        ({"subset": "some"}, r"subset \(all, or a number of records\) is 'some'"),
        ({"subset": True}, "a whole number >= 1"),
        ({"subset": 1.5}, "a whole number >= 1"),
        ({"subset": 3, "subset_seed": -1}, "subset_seed is -1"),
        ({"subset": 3, "subset_seed": "a"}, "subset_seed is 'a'"),
    ],
)
def test_wrong_values_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        choose_subset(ROWS, settings, "it")


def test_misspelled_names_are_errors_before_anything_is_loaded() -> None:
    bake = find_benchmark("bake")
    with pytest.raises(EditingError, match="Did you mean 'subset_seed'"):
        bake.check_settings({"subset_sed": 3})
    with pytest.raises(EditingError, match="subset_seed is 'x'"):
        bake.check_settings({"subset_seed": "x"})


def test_tasks_and_edits_have_the_same_cases_in_the_same_order(tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "records.jsonl", invented_records("bake_qa.jsonl")))
    settings = {"data": data, "subset": 3, "subset_seed": 5}
    expected = [str(row) for row in order(5, [0, 1, 2, 3])[:3]]
    for task in ("bake_es", "bake_gs"):
        built = build(task, **settings)
        docs = built.test_docs()
        assert [doc["edit_requests"][0]["case_id"] for doc in docs] == expected != ["0", "1", "2"]
        source = built.config.metadata["data_source"]
        assert {"records": 3, "subset": 3, "subset_seed": 5, "subset_of": 4}.items() <= source.items()
    edits = load_edits("bake", settings, None)
    assert [edit.case_id for edit in edits] == expected
    assert [edit.case_id for edit in load_edits("bake", settings, 2)] == expected[:2]
    with pytest.raises(EditingError, match="subset=5, but BAKE-Q&J"):
        manager("bake_es", data=data, subset=5).load(["bake_es"])["tasks"]["bake_es"].test_docs()


def test_skipped_records_leave_the_order_of_the_others(tmp_path: Path) -> None:
    records: list[Any] = invented_records("bake_qa.jsonl")
    records.insert(1, {"bad": 1})
    settings = {"data": str(write_jsonl(tmp_path / "r.jsonl", records)), "bad_records": "skip", "subset_seed": 5}
    loaded = find_benchmark("bake").load(settings)
    assert [int(str(case.request.case_id)) for case in loaded.records] == order(5, [0, 2, 3, 4])
