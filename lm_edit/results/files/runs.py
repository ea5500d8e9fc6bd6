"""Result files of lm-eval: finding, reading and checking them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import is_temporary, user_path
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.text.readable import readable
from lm_edit.results.files.result_shape import RESULT_FILE
from lm_edit.results.files.sample_rows import ExpectedSamples, read_samples
from lm_eval_tasks.report.run_facts import RunFacts, run_facts

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# The samples of a task, each after its location.
Samples: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT[\d.\-]+)$")
_TASK = re.compile(r"[^/\\\x00-\x1f]{1,150}")  # a part of the names of sample files
_NO_RESULTS = re.compile(r"attempt|results\.damaged-\d+")  # folders of a run of a sweep, beside its results


@dataclass(frozen=True, eq=False)
@readable
class ResultFile:
    """A result file of one run of lm-eval, and the sample files beside it."""

    path: Path
    content: Mapping[str, Any]

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "path", self.path
        yield "date", self.date
        yield "run", self.facts.name
        yield "tasks", list(self.tasks)

    @cached_property
    def facts(self) -> RunFacts:
        """The facts that identify the run."""
        return run_facts(self.content)

    @cached_property
    def date(self) -> str:
        """Start of the run, ISO 8601 in UTC."""
        start = self.content.get("date")
        if not isinstance(start, (int, float)) or isinstance(start, bool):
            return ""
        try:
            return datetime.fromtimestamp(start, tz=timezone.utc).isoformat(timespec="seconds")
        except (ValueError, OverflowError, OSError):  # NaN, or no year of the calendar
            return ""

    @property
    def date_id(self) -> str:
        """The date in the file's name, which its sample files share."""
        match = _DATE.search(self.path.stem)
        return match[1] if match else ""

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """Task or group -> its columns, as saved."""
        return self.content["results"]

    def task_config(self, task: str) -> Mapping[str, Any]:
        """Config of a task; empty for a group."""
        return self.content["configs"].get(task) or {}

    def num_cases(self, task: str) -> int | None:
        """Number of documents of a task that were asked; ``None`` for a group."""
        return (self.content["n-samples"].get(task) or {}).get("effective")

    @property
    def seconds(self) -> float | None:
        """How long lm-eval took, loading and edits included; ``None`` if the file does not have it."""
        total = self.content.get("total_evaluation_time_seconds")
        try:
            seconds = float(total) if isinstance(total, (int, float, str)) else math.nan
        except ValueError:
            return None
        return seconds if math.isfinite(seconds) and seconds >= 0 else None

    @cached_property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Group -> its members, which are tasks or groups; none where the file does not name them."""
        saved = {name: members for name, members in (self.content.get("group_subtasks") or {}).items() if members}
        names = {*saved, *(name for name in self.tasks if self.num_cases(name) is None)}
        return {name: tuple(saved.get(name, ())) for name in sorted(names)}

    def members(self, task: str) -> frozenset[str]:
        """The task itself and, of a group, its members at any depth."""
        found, left = {task}, [task]
        while left:
            new = set(self.groups.get(left.pop(), ())) - found
            found |= new
            left += new
        return frozenset(found)

    def sample_file(self, task: str) -> Path | None:
        """The file of a task's samples; ``None`` if the run saved none."""
        path = self.path.with_name(f"samples_{task}_{self.date_id}.jsonl")
        return path if path.is_file() else None

    def samples(self, task: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The samples of a task, each after its location; a document has one for each filter of the task.

        Raises:
            EditingError: if the run saved none, and as :func:`~lm_edit.results.files.sample_rows.read_samples`.
        """
        path = self.sample_file(task)
        if path is None:
            raise EditingError(
                f"{self.path} has no samples of {task} beside it; run lm_eval with --log_samples, and keep its files "
                "together."
            )
        return read_samples(path, self.expected_samples(task))

    def expected_samples(self, task: str) -> ExpectedSamples:
        """What the file records of a task's samples."""
        return ExpectedSamples(self.path.name, (self.content.get("task_hashes") or {}).get(task), self.num_cases(task))


def read_result_files(paths: Paths) -> list[ResultFile]:
    """Read all result files in files and folders, oldest first.

    Raises:
        EditingError: for missing and unreadable files, folders without results, and files that are something else.
    """
    files = [read_result_file(path) for path in dict.fromkeys(find_result_files(paths))]
    return sorted(files, key=lambda file: (file.date, file.path.name))


DAMAGED = "Was a copy interrupted? Move the file away, or run it again (in a sweep: lm-edit sweep ... --retry)."


def read_result_file(path: Path) -> ResultFile:
    """Read one result file.

    Raises:
        EditingError: for an unreadable file, and for one that is no result file of lm-eval.
    """
    content = read_json(path, "result file", advice=DAMAGED, finite=False, halves="replace")
    if problem := RESULT_FILE(content, "") or _misnamed(content):
        raise EditingError(f"{path}: not a result file as lm_eval --output_path saves it: {problem}.")
    return ResultFile(path, content)


def _misnamed(content: Mapping[str, Any]) -> str:
    """The first name of a task that could not be part of a file's name; "" if there is none."""
    for part in ("results", "configs", "n-samples"):
        for task in content[part]:
            if not _TASK.fullmatch(task):
                return f"{part} has {task[:80]!r}, which is no name of a task"
    return ""


def find_result_files(paths: Paths) -> Iterator[Path]:
    """Yield the files themselves, and the result files below folders.

    Left out are those of a sweep's unfinished runs, and damaged results that a sweep has set aside.

    Raises:
        EditingError: for paths that do not exist, and folders without result files.
    """
    yield from find_finished_files(paths, "results_*.json", "result file or folder", "--output_path")


def find_finished_files(paths: Paths, pattern: str, what: str, options: str) -> Iterator[Path]:
    """Yield the files themselves, and those below folders that a pattern matches, without those of unfinished runs.

    Args:
        what: names the paths in an error. options: those of lm_eval that write such files.

    Raises:
        EditingError: for paths that do not exist, and folders without such files.
    """
    for name in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        path = user_path(name, what)
        if path.is_dir():
            if not (inside := finished_files(path, pattern)):
                raise EditingError(f"no {pattern} in {path}; run lm_eval with {options}.")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise EditingError(f"there is no file or folder {path}.")


def finished_files(folder: Path, pattern: str) -> list[Path]:
    """The files below a folder that a pattern matches, without those of unfinished runs; none without the folder."""
    found = folder.rglob(pattern) if folder.is_dir() else ()
    return sorted(file for file in found if not _is_unfinished(file, folder))


def _is_unfinished(file: Path, folder: Path) -> bool:
    """Whether a command is still writing the file, or was killed meanwhile, or has set the file aside.

    It is then in a temporary folder, or, of lm_edit.sweeps, below ``<run>/attempt`` or ``<run>/results.damaged-<n>``,
    beside ``<run>/run.json``.
    """
    inner = file.relative_to(folder).parents
    if any(is_temporary(part) for part in inner):
        return True
    return any(_NO_RESULTS.fullmatch(part.name) and (folder / part.parent / "run.json").exists() for part in inner)
