"""Damaged records of every benchmark: loaded with their own content or rejected with a reason, never lost.

``-m slow`` makes ten thousand of them per benchmark.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from mutations import mutate
from record_files import write_jsonl
from task_runs import kept_records

from lm_eval_tasks.common.records.benchmark import all_benchmarks

BENCHMARKS = sorted({benchmark.name for benchmark in all_benchmarks().values()})

WORD = re.compile(r"\w+")


def words(value: Any) -> set[str]:
    """The words of all texts and numbers in a value."""
    return set(WORD.findall(json.dumps(value, ensure_ascii=False, default=str)))


def texts(value: Any) -> list[str]:
    """The texts inside of a value; parsers may count, but not write."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if isinstance(inner, (list, tuple)):
        return [text for item in inner for text in texts(item)]
    return [value] if isinstance(value, str) else []


def names(value: Any) -> set[str]:
    """The names of all fields in a value."""
    if isinstance(value, dict):
        return set(value).union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_mutation_is_loaded_right_or_rejected_with_a_reason(name: str, number: int, tmp_path: Path) -> None:
    benchmark = dataclasses.replace(all_benchmarks()[name], join=None)  # a case per record
    pristine = kept_records(benchmark)
    rng = random.Random(name)
    mutated = [mutate(rng.choice(pristine), rng) for _ in range(number)]
    data = str(write_jsonl(tmp_path / "mutated.jsonl", [*pristine, *mutated]))
    loaded = benchmark.load({"data": data, "bad_records": "skip"})

    rows = [int(str(case.request.case_id)) for case in loaded.records]
    skipped = {int(re.search(r"record (\d+)", where).group(1)): why for where, why in loaded.source["skipped"].items()}
    left_out = sum(loaded.source.get("left_out", {}).values())  # counted by reason
    assert len({*rows, *skipped}) == len(rows) + len(skipped) == len(pristine) + number - left_out
    assert rows[: len(pristine)] == list(range(len(pristine))) and len(rows) > number / 20

    # Words that the parser itself adds to a text; no mutation may add others.
    records, contents = [*pristine, *mutated], [texts(dataclasses.asdict(case)) for case in loaded.records]
    added = set().union(*(words(contents[row]) - words(record) for row, record in enumerate(pristine)))
    for row, content in zip(rows, contents, strict=True):
        assert words(content) <= words(records[row]) | added | {str(row)}, records[row]

    known = set().union(*map(names, pristine))
    for row, reason in skipped.items():
        assert len(reason) < 1500 and reason.isprintable()
        explained = not isinstance(records[row], dict) or "record of" in reason
        assert explained or any(field in reason for field in known | names(records[row])), (records[row], reason)
