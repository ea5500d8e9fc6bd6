"""Check of records without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest, describe_texts
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.json_io import read_rows
from lm_eval_tasks.common.records.benchmark import all_benchmarks, find_benchmark
from lm_eval_tasks.common.settings import Settings


@dataclass(frozen=True)
class Validation:
    """The result of a check.

    Attributes:
        source: origin of the records (JSON-able).
        num_good: valid records.
        problems: location of every other record -> reason.
        repeated: pairs of locations with the same edit; no error, but batch and sequential runs refuse them.
    """

    source: dict[str, Any]
    num_good: int
    problems: dict[str, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)


def validate(target: str, settings: Settings) -> Validation:
    """Check all records of a benchmark, or of a JSON or JSONL file of edit requests.

    Args:
        settings: for benchmarks: ``data``, ``data_revision``.

    Raises:
        EditingError: for an unknown name, and for data that cannot be read at all.
    """
    if target in all_benchmarks():
        return _validate_benchmark(target, settings)
    path = Path(target).expanduser()
    if path.is_file():
        return _validate_file(path)
    if path.suffix in (".json", ".jsonl"):
        raise EditingError(f"there is no file {path}.")
    raise EditingError(
        f"{target!r} is neither a benchmark nor a file.{near_misses(target, all_benchmarks())} "
        f"Benchmarks: {', '.join(all_benchmarks())}; use --data to check a benchmark's own file."
    )


def _validate_benchmark(name: str, settings: Settings) -> Validation:
    loaded = find_benchmark(name).load({**settings, "bad_records": "skip"})
    problems = loaded.source.pop("skipped", {})
    requests = {f"case {case.request.case_id}": case.request for case in loaded.records}
    return Validation(loaded.source, len(loaded.records), problems, _find_repeated(requests))


def _validate_file(path: Path) -> Validation:
    requests: dict[str, EditRequest] = {}
    problems: dict[str, str] = {}
    for where, record in read_rows(path):
        try:
            requests[where] = EditRequest.from_dict(record, where=where)
        except EditingError as error:
            problems[where] = str(error).removeprefix(f"{where}: ")
    source = {"file": str(path), **describe_texts(list(requests.values()))}
    return Validation(source, len(requests), problems, _find_repeated(requests))


def _find_repeated(requests: Mapping[str, EditRequest]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for where, request in requests.items():
        if request.key in first:
            pairs.append((first[request.key], where))
        first.setdefault(request.key, where)
    return pairs
