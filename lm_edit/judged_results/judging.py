"""Judged columns for the results of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import edit_hooks.lm.model  # noqa: F401  # registers the options that tasks accept in their metadata
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import user_path
from edit_hooks.utils.outputs import check_writable_folder
from judges.model.factory import make_model_judge
from judges.model.judge import Plan
from judges.settings import with_settings
from lm_edit.judged_results.checks import same_task
from lm_edit.judged_results.replay import Judged, SavedTask, build_task, items_to_judge, judge_task
from lm_edit.judged_results.sources import Source, find_sources
from lm_edit.judged_results.writing import output, refuse_existing
from lm_eval_tasks.common.columns import is_number
from lm_eval_tasks.common.judge_filter import PIPELINE


class JudgedColumn(NamedTuple):
    """A value that the judge gave to a task."""

    run: str
    task: str
    metric: str
    value: float | None
    num_cases: int


class Judging:
    """The results of finished runs and a judge for them.

    Args:
        paths: result files, sample files, or folders with both.
        judge: a choice of judge, as in ``--metadata judge=...``.
        include_paths: folders of tasks besides those of installed packages, as ``--include_path`` of ``lm_eval``.

    Raises:
        EditingError: for a choice that names no model judge, for an include path that is no folder, and as
            :func:`~lm_edit.judged_results.sources.find_sources`.
    """

    def __init__(self, paths: Sequence[str], judge: object, include_paths: Sequence[str] = ()) -> None:
        for path in include_paths:
            if not user_path(path, "folder of tasks").is_dir():
                raise EditingError(f"--include-path {path} is no folder; name the folder of the tasks' YAML files.")
        self.judge, self.include_paths = judge, [str(user_path(path, "folder of tasks")) for path in include_paths]
        self.model_judge = make_model_judge(judge)
        self.sources = find_sources(paths)

    @property
    def described(self) -> Mapping[str, Any]:
        """The judge's entry in the results."""
        return self.model_judge.describe()

    def plan(self) -> Plan:
        """The cost of judging, without a request; an answer that several tasks have is judged once.

        Raises:
            EditingError: if a task cannot be built, or is not the one that its run had.
        """
        silent = with_settings(self.judge, {"dry_run": True})
        items = [
            item
            for saved in self._saved_tasks()
            for item in items_to_judge(same_task(saved, silent, self.include_paths), saved)
        ]
        return self.model_judge.plan(items)

    def write(self, out: str | Path, *, overwrite: bool = False) -> tuple[list[Path], list[JudgedColumn]]:
        """Write the results with judged columns: for each result file one of all its tasks, with samples.

        Tasks without judged columns are copied. Nothing is written unless everything is judged.

        Returns:
            The files written, and the judged values of final answers.

        Raises:
            EditingError: as :meth:`plan`; for results that the folder has already; if the judge cannot be used or too
                few answers get a verdict.
        """
        folder = check_writable_folder(out)
        for source in self.sources if not overwrite else ():
            refuse_existing(folder, source.file, self.described)
        delimiters = {}
        for saved in self._saved_tasks():  # of all files, before the first request
            task = same_task(saved, self.judge, self.include_paths)
            delimiters[saved.file.path, saved.name] = task.saved.delimiter if task.saved else None
        columns: list[JudgedColumn] = []
        with output(folder) as files:
            for source in self.sources:
                judged = {task: self._judge(source, task, delimiters[source.file.path, task]) for task in source.tasks}
                files.add(source.file, judged, self.described)
                columns += _columns(source, judged)
        return files.written, columns

    def _saved_tasks(self) -> Iterator[SavedTask]:
        return (SavedTask(source.file, task) for source in self.sources for task in source.tasks)

    def _judge(self, source: Source, task: str, delimiter: str | None) -> Judged:
        saved = SavedTask(source.file, task)  # read again: the samples of all tasks need not fit into memory
        try:
            return judge_task(build_task(saved, self.judge, self.include_paths, delimiter), saved)
        except EditingError as error:
            message = f"{source.file.path}, {task}: {error} Nothing was written; the same command goes on from there."
            raise type(error)(message) from None


def _columns(source: Source, judged: Mapping[str, Judged]) -> Iterator[JudgedColumn]:
    for task, result in judged.items():
        listed = [*result.config["metric_list"], *result.config["other_metrics"]]
        for metric in (one["metric"] for one in listed if one.get("from") == "judge"):
            value = result.columns.get(f"{metric},{PIPELINE}")
            number = float(value) if is_number(value) else None
            num_cases = result.columns.get(f"{metric}_n,{PIPELINE}", 0)
            yield JudgedColumn(source.file.facts.name, task, metric, number, num_cases)
