"""Check of records without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_hooks.lm.options.edit_sources import read_requests
from edit_hooks.request import EditRequest, describe_texts
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.files import names_file
from lm_eval_tasks.common.records.benchmark import all_benchmarks, check_data, find_benchmark, load_own_file
from lm_eval_tasks.common.records.dataset import LoadedRecords
from lm_eval_tasks.common.settings import BAD_RECORDS, Settings

SKIP: Settings = {BAD_RECORDS.name: "skip"}


@dataclass(frozen=True)
class Validation:
    """The result of a check.

    Attributes:
        source: origin of the records (JSON-able).
        num_good: valid records.
        problems: location of every other record -> reason.
        repeated: pairs of locations with the same edit; no error; batch and sequential runs make the edit once.
    """

    source: dict[str, Any]
    num_good: int
    problems: dict[str, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)


def validate(target: str, settings: Settings) -> Validation:
    """Check all records of a benchmark, or of a JSON or JSONL file of edit requests or of a benchmark's records.

    Args:
        settings: for benchmarks: ``data``, ``data_revision``.

    Raises:
        EditingError: for an unknown name, and for data that cannot be read at all.
    """
    if target in all_benchmarks():
        check_data(target, settings.get("data"))
        return _validated(find_benchmark(target).load({**settings, **SKIP}))
    if names_file(target) or Path(target).is_file():
        rows = read_requests(target)
        return _validated(load_own_file(target, SKIP)) if rows is None else _validate_requests(target, rows)
    raise EditingError(
        f"{target!r} is neither a benchmark nor a file.{near_misses(target, all_benchmarks())} "
        f"Benchmarks: {', '.join(all_benchmarks())}; use --data to check a benchmark's own file."
    )


def _validated(loaded: LoadedRecords[Any]) -> Validation:
    problems = loaded.source.pop("skipped", {})
    requests = {f"case {case.request.case_id}": case.request for case in loaded.records}
    return Validation(loaded.source, len(loaded.records), problems, _find_repeated(requests))


def _validate_requests(path: str, rows: Sequence[tuple[str, Any]]) -> Validation:
    requests: dict[str, EditRequest] = {}
    problems: dict[str, str] = {}
    for where, record in rows:
        try:
            requests[where] = EditRequest.from_dict(record, where=where)
        except EditingError as error:
            problems[where] = str(error).removeprefix(f"{where}: ")
    source = {"file": path, **describe_texts(list(requests.values()))}
    return Validation(source, len(requests), problems, _find_repeated(requests))


def _find_repeated(requests: Mapping[str, EditRequest]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    pairs = []
    for where, request in requests.items():
        if request.key in first:
            pairs.append((first[request.key], where))
        first.setdefault(request.key, where)
    return pairs
