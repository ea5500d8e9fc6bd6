"""Checks of result files: readability, completeness, consistency, and paths in a results repository."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import user_path
from lm_edit.results.checking.file_check import OF_CASE_SET, Problem, check_file
from lm_edit.results.checking.repository import MARKER, identities, misplaced, read_marker, unreadable
from lm_edit.results.files.runs import Paths, ResultFile, find_result_files


class CheckReport(NamedTuple):
    """What :func:`check_results` returns.

    Attributes:
        num_files: number of result files.
        problems: all that is wrong.
        num_unverified: tasks without samples, whose numbers were not computed again.
        has_repository: a path is a results repository, whose runs need not be comparable.
        files: those that can be read.
        asked: a row for each case of the tasks with samples, with what the leaderboard compares of it.
    """

    num_files: int
    problems: list[Problem]
    num_unverified: int
    has_repository: bool
    files: list[ResultFile]
    asked: pd.DataFrame


def check_results(paths: Paths) -> CheckReport:
    """Check result files and their samples, and the layout of a results repository.

    Raises:
        EditingError: for paths that do not exist, and folders without result files.
    """
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    roots = [root for name in names if ((root := user_path(name, "result file or folder")) / MARKER).is_file()]
    refused = [Problem(path, text) for root in roots for path, text in unreadable(root)]
    new = {root for root in roots if not any(root.rglob("results_*.json"))}  # a repository before its first results
    try:
        files = list(dict.fromkeys(find_result_files([name for name in names if Path(name) not in new])))
    except EditingError:
        if not refused:
            raise
        files = []  # the folder of results is itself a link
    readable = [path for path in files if not _is_refused(path, refused)]
    checked = [check_file(path) for path in readable]
    problems = refused + [problem for one in checked for problem in one.problems]
    for root in roots:
        problems += _check_repository(root, [path for path in readable if path.is_relative_to(root)])
    asked = pd.DataFrame([case for one in checked for case in one.asked], columns=list(OF_CASE_SET))
    return CheckReport(
        len(files),
        problems,
        sum(len(one.without_samples) for one in checked),
        bool(roots),
        [one.file for one in checked if one.file is not None],
        asked,
    )


def _is_refused(path: Path, refused: Sequence[Problem]) -> bool:
    """Whether a file, a folder above it, or a file beside it that would be read with it, is not to be read."""
    return any(path.is_relative_to(problem.path) or path.parent == problem.path.parent for problem in refused)


def _check_repository(root: Path, files: Sequence[Path]) -> Iterator[Problem]:
    try:
        read_marker(root)
    except EditingError as error:
        yield Problem(root / MARKER, str(error))
        return
    yield from (Problem(path, text) for path, text in misplaced(root))
    places: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for path in files:
        for identity in identities(path):
            places[identity].append(path)
    repeated = {(tuple(paths), key[0]) for key, paths in places.items() if len(paths) > 1}
    for paths, task in sorted(repeated):
        names = ", ".join(path.name for path in paths[:-1])
        yield Problem(paths[-1], f"{task} of this run is in {names} already; results are added, never replaced.")
