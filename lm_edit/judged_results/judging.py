"""Judged columns for the results of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import edit_hooks.lm.model  # noqa: F401  # registers the options that tasks accept in their metadata
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import remove_leftovers, user_path
from edit_hooks.utils.storage.outputs import check_writable_folder
from judges.base import CoverageError, what_is_kept
from judges.model.cost import CostEstimate
from judges.model.factory import make_model_judge
from judges.model.judge import ModelJudge
from judges.settings import with_settings
from lm_edit.judged_results.checks import same_task
from lm_edit.judged_results.replay import JudgedTask, SavedTask, build_task, items_to_judge, judge_task, task_files
from lm_edit.judged_results.sources import JudgedFile, find_sources
from lm_edit.judged_results.writing import write_judged, written_before
from lm_eval_tasks.common.scoring.columns import is_number
from lm_eval_tasks.common.scoring.metric_list import declared_metrics
from lm_eval_tasks.common.task.judge_filter import PIPELINE

log = get_logger(__name__)


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
        self.judge = judge
        self._task_files = task_files([str(user_path(path, "folder of tasks")) for path in include_paths])
        self.model_judge = make_model_judge(judge)
        self.sources = find_sources(paths)

    @property
    def described(self) -> Mapping[str, Any]:
        """The judge's entry in the results."""
        return self.model_judge.describe()

    def plan(self, out: str | Path, *, overwrite: bool = False) -> CostEstimate:
        """The cost of :meth:`write`, without a request; an answer that several tasks have is judged once.

        Raises:
            EditingError: if a task cannot be built, or is not the one that its run had; and for an output that has all.
        """
        silent = with_settings(self.judge, {"dry_run": True})
        items = [
            item
            for saved in _saved_tasks(self._left(check_writable_folder(out), overwrite))
            for item in items_to_judge(same_task(saved, silent, self._task_files), saved)
        ]
        return self.model_judge.plan(items)

    def write(self, out: str | Path, *, overwrite: bool = False) -> tuple[list[Path], list[JudgedColumn]]:
        """Write the results with judged columns: for each result file one of all its tasks, with samples.

        Tasks of which the folder has the verdicts already are not judged again, and tasks without judged columns are
        copied. The results of a file appear when all its tasks are judged; an error in a later one leaves them there.

        Args:
            overwrite: judge again what the folder has, and replace it.

        Returns:
            The result files written, and the judged values of final answers.

        Raises:
            EditingError: as :meth:`plan`; if the judge cannot be used or too few answers get a verdict.
        """
        folder = check_writable_folder(out)
        remove_leftovers(folder)
        sources = self._left(folder, overwrite)
        separators = {}
        for saved in _saved_tasks(sources):  # of all files, before the first request
            task = same_task(saved, self.judge, self._task_files)
            separators[saved.file.path, saved.name] = task.saved.separator if task.saved else None
        written: list[Path] = []
        columns: list[JudgedColumn] = []
        for source in sources:
            with _with_state(len(written), self.model_judge):
                judged = {task: self._judge(source, task, separators[source.file.path, task]) for task in source.tasks}
            written.append(write_judged(folder, source.file, judged, self.described))
            columns += _columns(source, judged)
        return written, columns

    def _left(self, out: Path, overwrite: bool) -> list[JudgedFile]:
        """The sources with the tasks that are to be judged.

        Raises:
            EditingError: if there are none.
        """
        if overwrite:
            return self.sources
        left = []
        for source in self.sources:
            before = written_before(out, source.file, self.described)
            tasks = tuple(task for task in source.tasks if task not in before)
            if done := [task for task in source.tasks if task in before]:
                has = f"{before[done[0]].path} has the verdicts of this judge on {', '.join(done)}"
                log.warning("%s: %s left out; %s", source.file.path, "these tasks are" if tasks else "it is", has)
            if tasks:
                left.append(JudgedFile(source.file, tasks))
        if not left:
            raise EditingError(
                f"{out} has the verdicts of this judge on all these answers already; name another folder, or replace "
                "its files with --overwrite."
            )
        return left

    def _judge(self, source: JudgedFile, task: str, separator: str | None) -> JudgedTask:
        saved = SavedTask(source.file, task)  # read again: the samples of all tasks need not fit into memory
        try:
            return judge_task(build_task(saved, self.judge, self._task_files, separator), saved)
        except EditingError as error:
            raise type(error)(f"{source.file.path}, {task}: {error}") from None


def _saved_tasks(sources: Sequence[JudgedFile]) -> Iterator[SavedTask]:
    return (SavedTask(source.file, task) for source in sources for task in source.tasks)


@contextmanager
def _with_state(num_written: int, judge: ModelJudge) -> Iterator[None]:
    """Add to the message of an error which results are written, and which requests the next command sends.

    An error about coverage names these requests itself.
    """
    try:
        yield
    except EditingError as error:
        has_advice = isinstance(error, CoverageError)
        kept = "" if has_advice else f" {what_is_kept(judge.store.is_kept, 'verdict store')}"
        before = f"; those of the runs before it ({num_written}) were, and are not judged again" if num_written else ""
        raise type(error)(f"{error}{kept} No results of this run were written{before}.") from None


def _columns(source: JudgedFile, judged: Mapping[str, JudgedTask]) -> Iterator[JudgedColumn]:
    for task, result in judged.items():
        declared = declared_metrics(result.config)
        for metric in (name for name, one in declared.items() if one.get("from") == "judge"):
            value = result.columns.get(f"{metric},{PIPELINE}")
            number = float(value) if is_number(value) else None
            num_cases = result.columns.get(f"{metric}_n,{PIPELINE}", 0)
            yield JudgedColumn(source.file.facts.name, task, metric, number, num_cases)
