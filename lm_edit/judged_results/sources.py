"""The tasks of finished runs that take a judge, among files and folders of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import user_path
from lm_edit.results.answers.sample_files import current_sample_files
from lm_edit.results.files.runs import ResultFile, read_result_file
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.tables import current_tasks

NEEDED = "--write-results needs the files of lm_eval --output_path --log_samples as the run left them"


class JudgedFile(NamedTuple):
    """A result file, and those of its tasks that are judged: each with current samples, and with judged columns."""

    file: ResultFile
    tasks: tuple[str, ...]


def find_sources(paths: Sequence[str]) -> list[JudgedFile]:
    """Find the tasks to judge, by result file.

    The samples are those of :func:`~lm_edit.results.answers.sample_files.current_sample_files`. A result file includes
    all sample files beside it.

    Raises:
        EditingError: for samples without a result file, for tasks with judged columns and without samples, and where
            no task has judged columns.
    """
    named = [user_path(path, "file or folder of results") for path in paths]
    result_files = [path for path in named if path.is_file() and path.name.startswith("results_")]
    samples = [str(path) for path in named if path not in result_files]
    for file in map(read_result_file, result_files):
        found = [file.sample_file(task) for task in file.tasks]
        samples += [str(path) for path in found if path is not None]
    _refuse_without_samples([*result_files, *(path for path in named if path.is_dir())])
    tasks: dict[str, list[str]] = {}
    for source in current_sample_files(samples):
        if not source.results:
            raise EditingError(
                f"{source.path} has no readable result file beside it, for judged columns to be added; {NEEDED}."
            )
        tasks.setdefault(source.results, []).append(source.task)
    files = {read_result_file(Path(path)): of_file for path, of_file in tasks.items()}
    sources = [
        JudgedFile(file, tuple(task for task in file.tasks if task in of_file and TaskFacts(file, task).takes_judge))
        for file, of_file in files.items()
    ]
    if not any(source.tasks for source in sources):
        known = dict.fromkeys(task for of_file in tasks.values() for task in of_file)
        raise EditingError(
            f"none of these tasks has a column that a judge decides: {', '.join(known)}. Tasks with such columns are "
            "those of WILD, as qaedit_wild; runs with --predict_only have no columns at all."
        )
    return [source for source in sources if source.tasks]


def _refuse_without_samples(paths: Sequence[Path]) -> None:
    """Refuse current results with judged columns whose samples were not saved."""
    places = current_tasks(paths) if paths else ()
    if missing := [(file, task) for file, task in places if not file.sample_file(task)]:
        for file, task in missing:
            if TaskFacts(file, task).takes_judge:
                raise EditingError(
                    f"{file.path} has no samples of {task} beside it; run lm_eval with --log_samples (finished edits "
                    "and answers come from the store), and keep its files together."
                )
