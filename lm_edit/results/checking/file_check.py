"""Checks of one result file: readable, complete, consistent with itself and with its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from lm_edit.results.answers.documents import task_documents
from lm_edit.results.answers.recompute import wrong_numbers
from lm_edit.results.files.provenance import judgings
from lm_edit.results.files.runs import ResultFile, read_result_file
from lm_edit.results.tables import case_rows, result_rows

# What the leaderboard compares of the cases that runs asked.
OF_CASE_SET = ("run", "file", "task", "doc_id", "case_id", "prompt_hash")
COUNTS = ("n", "excluded", "failed")


class Problem(NamedTuple):
    """Something wrong with a file."""

    path: Path
    text: str


class FileCheck(NamedTuple):
    """What :func:`check_file` returns.

    Attributes:
        problems: all that is wrong.
        without_samples: tasks whose numbers nothing shows to be right.
        file: the content; ``None`` if it cannot be read.
        asked: a row of :data:`OF_CASE_SET` for each case of a task with samples.
    """

    problems: list[Problem]
    without_samples: list[str]
    file: ResultFile | None = None
    asked: Sequence[tuple[Any, ...]] = ()


def check_file(path: Path) -> FileCheck:
    """Check a result file, and the samples beside it."""
    try:
        file = read_result_file(path)
        rows = list(result_rows(file))
        judgings(file)
    except EditingError as error:
        return FileCheck([Problem(path, _without_path(error, path))], [])
    texts = [] if rows else ["no task reports a metric."]
    texts += [text for row in rows for text in _wrong_row(file, row)]
    texts += [f"{path.name}: samples of no task of these results." for path in _foreign_samples(file)]
    asked = [task for task in file.tasks if file.num_cases(task) is not None]
    without = [task for task in asked if file.sample_file(task) is None]
    cases: dict[tuple[Any, ...], None] = {}
    texts += [text for task in asked if task not in without for text in _wrong_samples(file, task, cases)]
    return FileCheck([Problem(path, text) for text in texts], without, file, list(cases))


def _foreign_samples(file: ResultFile) -> Iterator[Path]:
    """Sample files beside a result file whose tasks it lacks."""
    known = {f"samples_{task}_{file.date_id}.jsonl" for task in file.content["n-samples"]}
    if file.date_id:
        found = sorted(file.path.parent.glob(f"samples_*_{file.date_id}.jsonl"))
        yield from (path for path in found if path.name not in known)


def _wrong_row(file: ResultFile, row: Mapping[str, Any]) -> Iterator[str]:
    """What no run can have: scores that are not finite, counts above the cases, shares outside 0 to 1."""
    name = f"{row['task']}, {row['metric']}" + (f"@{row['stage']}" if row["stage"] else "")
    for column in ("value", "stderr", "or_0"):
        if row[column] is not None and not math.isfinite(row[column]):
            yield f"{name}: {column} is {row[column]}."
    cases, counted = file.num_cases(row["task"]), sum(row[column] or 0 for column in COUNTS)
    if cases is not None and counted > cases:
        yield f"{name}: {counted:g} cases are counted, but {cases} were asked."
    if (row["zeroed"] or 0) > (row["failed"] or 0):
        yield f"{name}: {row['zeroed']:g} cases count as 0, but only {row['failed'] or 0:g} have no value."
    if row["value"] is None and row["n"]:
        yield f"{name}: {row['n']:g} scored cases, but no value."
    if row["is_rate"] and row["value"] is not None and not (row["stage"] == "difference" or 0 <= row["value"] <= 1):
        yield f"{name}: {row['value']} is no share."


def _wrong_samples(file: ResultFile, task: str, cases: dict[tuple[Any, ...], None]) -> Iterator[str]:
    """What differs between the samples of a task and its results: number of documents, and every number.

    Args:
        cases: extended by what was asked.
    """
    if not (file.content.get("task_hashes") or {}).get(task):
        yield f"{task}: there are samples, but no hash of them in 'task_hashes'; keep the files of one run together."
    try:
        samples = file.samples(task)
        for row in case_rows(file, task, samples):  # as the leaderboard reads them
            cases[tuple(row[name] for name in OF_CASE_SET)] = None
        num_documents = sum(1 for _ in task_documents(file, task, samples))
        if num_documents != (asked := file.num_cases(task)):
            yield f"{task}: {num_documents} documents in the samples, but {asked} were asked."
        yield from wrong_numbers(file, task, samples)
    except EditingError as error:
        yield _without_path(error, file.path)


def _without_path(error: EditingError, path: Path) -> str:
    return str(error).removeprefix(f"{path}").lstrip(":, ")
