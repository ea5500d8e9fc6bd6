"""Checks of result files: readable, complete, consistent, and in a results repository at their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import user_path
from lm_edit.results.documents import task_documents
from lm_edit.results.repository import MARKER, misplaced, read_marker
from lm_edit.results.runs import Paths, ResultFile, find_result_files, read_result_file
from lm_edit.results.tables import case_rows, result_rows

TOLERANCE = 1e-9


class Problem(NamedTuple):
    """Something wrong with a file."""

    path: Path
    text: str


def check_results(paths: Paths) -> tuple[int, list[Problem]]:
    """Check result files and their samples; a folder that holds a results repository also for its layout.

    Returns:
        The number of result files, and all problems.

    Raises:
        EditingError: for paths that do not exist, and folders without result files.
    """
    names = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = list(dict.fromkeys(find_result_files(names)))
    problems = [problem for path in files for problem in _check_file(path)]
    for name in names:
        root = user_path(name, "result file or folder")
        if (root / MARKER).is_file():
            problems += [Problem(path, text) for path, text in _check_repository(root)]
    return len(files), problems


def _check_file(path: Path) -> Iterator[Problem]:
    try:
        file = read_result_file(path)
        rows = list(result_rows(file))
    except EditingError as error:
        yield Problem(path, str(error).removeprefix(f"{path}").lstrip(":, "))
        return
    if not rows:
        yield Problem(path, "no task reports a metric.")
    for row in rows:
        name = f"{row['task']}, {row['metric']}" + (f"@{row['stage']}" if row["stage"] else "")
        cases = file.num_cases(row["task"])
        for column in ("value", "stderr", "or_0"):
            if row[column] is not None and not math.isfinite(row[column]):
                yield Problem(path, f"{name}: {column} is {row[column]}.")
        counted = sum(row[column] or 0 for column in ("n", "excluded", "failed"))
        if cases is not None and counted > cases:
            yield Problem(path, f"{name}: {counted:g} cases are counted, but {cases} were asked.")
        if row["value"] is None and row["n"]:
            yield Problem(path, f"{name}: {row['n']:g} scored cases, but no value.")
        if row["is_rate"] and row["value"] is not None and not 0 <= row["value"] <= 1:
            yield Problem(path, f"{name}: {row['value']} is no share.")
    for task in file.tasks:
        if file.sample_file(task) is not None:
            yield from (Problem(path, text) for text in _check_samples(file, task))


def _check_samples(file: ResultFile, task: str) -> Iterator[str]:
    """Compare the samples of a task with its results: number of documents, and the mean of the cases."""
    try:
        cases = list(case_rows(file, task))
        num_documents = sum(1 for _ in task_documents(file, task))
    except EditingError as error:
        yield str(error).removeprefix(f"{file.path}").lstrip(":, ")
        return
    asked = file.num_cases(task)
    if asked is not None and num_documents != asked:
        yield f"{task}: {num_documents} documents in the samples, but {asked} were asked."
    for row in result_rows(file):
        if row["task"] != task or not row["is_rate"]:
            continue
        place = ("metric", "stage", "filter")
        own = [case for case in cases if all(case[name] == row[name] for name in place)]
        values = [case["value"] for case in own if case["value"] is not None]
        mean = math.fsum(values) / len(values) if values else None
        if (mean is None) != (row["value"] is None) or (mean is not None and abs(mean - row["value"]) > TOLERANCE):
            yield f"{task}, {row['metric']}: the result is {row['value']}, but the mean of the samples is {mean}."


def _check_repository(root: Path) -> Iterator[tuple[Path, str]]:
    try:
        read_marker(root)
    except EditingError as error:
        yield root / MARKER, str(error)
        return
    yield from misplaced(root)
