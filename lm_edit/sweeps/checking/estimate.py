"""Seconds that runs will take, from those that result files of earlier runs have stored.

A run's seconds are those of its edits and those of its questions: seconds per edit are in the results, by editor and
model; the rest of a run's time, divided by its cases, is the time per case. Loading the model is part of that rest, so
runs with few cases give estimates that are too long for runs with many.

Batches and streams write all cases of their source of edits unless ``num_edits`` is given: a limit on the documents
cuts their questions alone, a ``subset`` of the records cuts both. The documents of a subset that was not evaluated are
counted as one per record, at most those of the whole data. Runs of one batch or stream make its edits once: the others
take them from the store.

A plan may state seconds per edit and per case, which count where nothing comparable was measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from edit_hooks.run_options import PLANNED, RUN_OPTIONS
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.hashing import key_of
from lm_edit.results.files.runs import ResultFile, read_result_files
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.sweeps.checking.tasks import benchmarks_of, leaf_tasks
from lm_edit.sweeps.execution.scored import tasks_without_scores
from lm_edit.sweeps.planning.choices import UNEDITED
from lm_edit.sweeps.planning.grid import Run
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.settings import SUBSET
from lm_eval_tasks.report.run_options import model_arguments

Key: TypeAlias = tuple[Any, ...]


class Estimator:
    """Estimates from result files; the most similar ones count, and their median.

    Args:
        paths: result files, or folders with some.
        own: folders of results of the sweep itself; those that cannot be read are in ``unreadable``.

    Attributes:
        unreadable: folder of ``own`` -> why it cannot be read.

    Raises:
        EditingError: as :func:`lm_edit.results.files.runs.read_result_files`, for ``paths``.
    """

    def __init__(self, paths: Sequence[str], own: Sequence[str] = ()) -> None:
        self._per_edit: defaultdict[Key, list[float]] = defaultdict(list)
        self._per_case: defaultdict[Key, list[float]] = defaultdict(list)
        self._sizes: dict[Key, int] = {}  # (task, data, subset) -> documents
        self._unscored: dict[Key, str] = {}  # (model, editor, mode, data, task) -> why no case has a score
        self.unreadable: dict[str, str] = {}
        for file in read_result_files(paths) if paths else ():
            self._learn(file)
        for folder in own:
            try:
                for file in read_result_files(folder):
                    self._learn(file)
            except EditingError as error:
                self.unreadable[folder] = str(error)

    def seconds(self, run: Run, *, makes_edits: bool = True) -> float | None:
        """Seconds of a run; ``None`` if nothing comparable is known, or the number of cases is not.

        Args:
            makes_edits: whether they are not in the store.
        """
        model = _model(run.model_args)
        editor = UNEDITED if run.model_args["mode"] == "none" else str(run.model_args["editor"])
        tasks = tuple(sorted(task for name in run.tasks for task in leaf_tasks(name)))
        cases = {task: self._num_cases(task, run) for task in tasks}
        known = [number for number in cases.values() if number is not None]
        per_case = _median(self._per_case, [(model, editor, tasks), (model, tasks), (model, editor), (model,)])
        per_edit = 0.0 if editor == UNEDITED or not makes_edits else _median(self._per_edit, [(model, editor)])
        per_case = run.seconds_per_case if per_case is None else per_case
        per_edit = run.seconds_per_edit if per_edit is None else per_edit
        if per_case is None or per_edit is None or len(known) < len(cases):
            return None
        num_edits = self._num_edits(run, {task: int(cases[task] or 0) for task in tasks})
        return None if num_edits is None else per_case * sum(known) + per_edit * num_edits

    @staticmethod
    def edits_of(run: Run) -> str | None:
        """The edits of a batch or stream as a key; ``None`` for runs whose edits follow from their cases."""
        if run.model_args["mode"] not in PLANNED:
            return None
        ignored = {option.name for option in RUN_OPTIONS if option.changes in ("answers", "nothing")}
        return key_of({name: value for name, value in run.model_args.items() if name not in ignored})

    def warnings(self, run: Run) -> list[str]:
        """Sentences about the tasks of a run of which an earlier run of the same kind has no scored case."""
        args = run.model_args
        editor = UNEDITED if args["mode"] == "none" else str(args["editor"])
        of_run = (_model(args), editor, args["mode"], _data(args))
        tasks = [task for name in run.tasks for task in leaf_tasks(name)]
        return [
            f"in an earlier run, no case of {task} has a score ({reason})"
            for task in tasks
            if (reason := self._unscored.get((*of_run, task)))
        ]

    def _num_cases(self, task: str, run: Run) -> int | None:
        size = self._size(task, run.model_args)
        if run.limit is None:
            return size
        if run.limit < 1:
            return None if size is None else round(run.limit * size)
        return int(run.limit if size is None else min(run.limit, size))

    def _num_edits(self, run: Run, cases: Mapping[str, int]) -> int | None:
        """Number of edits of a run, if it is known; tasks of one benchmark share them."""
        args = run.model_args
        if args["mode"] == "none":
            return 0
        if args.get("num_edits") is not None:
            return int(args["num_edits"])
        if args["mode"] != "single":  # the limit cuts the questions alone
            return self._size_of(str(args["edits"]), args)
        by_benchmark: dict[str, int] = {}
        for task, number in cases.items():
            for benchmark in benchmarks_of(task):
                by_benchmark[benchmark.name] = max(number, by_benchmark.get(benchmark.name, 0))
        return sum(by_benchmark.values())

    def _size(self, task: str, args: Mapping[str, Any]) -> int | None:
        """Documents of a task in the data and the subset that arguments name."""
        data, subset = _data(args), SUBSET.read(args)
        if (size := self._sizes.get((task, data, subset))) is not None or subset is None:
            return size
        whole = self._sizes.get((task, data, None))
        return None if whole is None else min(int(subset), whole)

    def _size_of(self, source: str, args: Mapping[str, Any]) -> int | None:
        """Cases of a source of edits: the most that a task of the benchmark has; ``None`` for a file."""
        if source.endswith((".json", ".jsonl")):
            return None
        name = find_benchmark(source).name
        tasks = {task for task, data, _ in self._sizes if data == _data(args) and _asks_about(task, name)}
        sizes = [size for task in tasks if (size := self._size(task, args)) is not None]
        return max(sizes, default=None)

    def _learn(self, file: ResultFile) -> None:
        config = file.content["config"]
        own = config.get("edited_hf")
        if own is None:
            return
        args = model_arguments(config.get("model_args"))
        model, mode = _model(args), own.get("mode")
        editor = UNEDITED if mode == "none" else str(own.get("editor"))
        for task, reason in tasks_without_scores(file).items():
            self._unscored[model, editor, mode, _data(args), task] = reason
        total = file.seconds
        if total is None:
            return
        tasks = tuple(sorted(file.content["n-samples"]))
        for task in tasks:
            if (size := file.content["n-samples"][task].get("original")) is not None:
                self._sizes[task, _data(args), SUBSET.read(args)] = size
        edits = [_edit_summary(file, task) for task in file.tasks]
        # tasks of one run share edits, so the largest number is that of the run, unless its benchmarks differ
        made = max((number * seconds for number, seconds in edits), default=0.0)
        if made:
            self._per_edit[model, editor].append(max(seconds for _, seconds in edits))
        elif editor != UNEDITED and edits:
            self._per_edit[model, editor].append(0.0)
        rest = total - made if total > made else total  # more than the total: the edits were loaded from the store
        number = sum(file.num_cases(task) or 0 for task in tasks)
        if number:
            for key in ((model, editor, tasks), (model, tasks), (model, editor), (model,)):
                self._per_case[key].append(rest / number)


def _median(measured: Mapping[Key, list[float]], keys: Sequence[Key]) -> float | None:
    """The median of the first key that was measured."""
    return next((statistics.median(measured[key]) for key in keys if measured.get(key)), None)


def _asks_about(task: str, benchmark: str) -> bool:
    """Whether a task asks about the edits of a benchmark; results may have tasks that are not installed here."""
    try:
        return any(one.name == benchmark for one in benchmarks_of(task))
    except EditingError:
        return False


def _model(args: Mapping[str, Any]) -> str | None:
    return None if args.get("pretrained") is None else str(args["pretrained"])


def _data(args: Mapping[str, Any]) -> str:
    return str(args.get("data") or ("mini" if args.get("pretrained") is None else "hub"))


def _edit_summary(file: ResultFile, task: str) -> tuple[float, float]:
    """Number of edits and seconds per edit in the results of one task."""
    content = TaskFacts(file, task).summary("none")["edit"]
    return _number(content.get("edits")) or 0.0, _number(content.get("seconds_per_edit")) or 0.0


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None
