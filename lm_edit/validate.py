"""Checking records without running anything: how many are good, and what is wrong with the others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, near_misses
from lm_eval_tasks.common.benchmarks import BENCHMARKS
from lm_eval_tasks.common.dataset import read_rows


@dataclass(frozen=True)
class Validation:
    """What a check found.

    Attributes:
        source: where the records come from (JSON-able).
        num_good: records that can be used.
        problems: place of every other record -> reason.
        repeated: pairs of places that hold the same edit; no error, but batch and sequential runs refuse them.
    """

    source: dict[str, Any]
    num_good: int
    problems: dict[str, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)


def validate(what: str, settings: Mapping[str, Any]) -> Validation:
    """Check all records of a benchmark (by name) or of a JSON or JSONL file of edit requests.

    Args:
        settings: as the tasks' metadata, for benchmarks: ``data``, ``data_revision``.

    Raises:
        EditingError: for an unknown name, and for data that cannot be read at all.
    """
    if what in BENCHMARKS:
        return _of_benchmark(what, settings)
    path = Path(what).expanduser()
    if path.is_file():
        return _of_file(path)
    if path.suffix in (".json", ".jsonl"):
        raise EditingError(f"there is no file {path}.")
    raise EditingError(
        f"{what!r} is neither a benchmark nor a file.{near_misses(what, BENCHMARKS)} "
        f"Benchmarks: {', '.join(BENCHMARKS)}; a benchmark's own file is checked with --data."
    )


def _of_benchmark(name: str, settings: Mapping[str, Any]) -> Validation:
    folder, subset = BENCHMARKS[name]
    benchmark = importlib.import_module(f"lm_eval_tasks.{folder}.utils")
    loaded = benchmark.load_records({**settings, "bad_records": "skip"}, subset)
    source = {key: value for key, value in loaded.source.items() if key != "skipped"}
    requests = {f"case {record.request.case_id}": record.request for record in loaded.records}
    return Validation(source, len(loaded.records), dict(loaded.source.get("skipped", {})), _repeated(requests))


def _of_file(path: Path) -> Validation:
    requests: dict[str, EditRequest] = {}
    problems: dict[str, str] = {}
    for where, record in read_rows(path):
        try:
            requests[where] = EditRequest.from_dict(record, where=where)
        except EditingError as error:
            problems[where] = str(error).removeprefix(f"{where}: ")
    return Validation({"file": str(path)}, len(requests), problems, _repeated(requests))


def _repeated(requests: Mapping[str, EditRequest]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for where, request in requests.items():
        if request.key in first:
            pairs.append((first[request.key], where))
        first.setdefault(request.key, where)
    return pairs
