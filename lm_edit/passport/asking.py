"""Run tasks on a model and read their columns as scores, by the rules of every other table of results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval_editing_autoload
from edit_hooks.lm.model import EditedHFLM
from lm_edit.passport.record import PassportScore
from lm_edit.results.filters import is_missing
from lm_edit.results.statistics.of_rows import interval_of
from lm_edit.results.tables import load_cases, load_results
from lm_eval_tasks.folder import TASKS_DIR
from lm_eval_tasks.startup.saving import save_or_fail

UNEDITED = "unedited"  # stage of ordinary tasks, and end of the names of columns about the unedited model
NOT_REPORTED = "no asked fact has what this column compares, as an old answer"  # tasks then leave a column out
EXCLUDED = "excluded by the column's own filter"


class TaskColumn(NamedTuple):
    """A column of a task that a passport prints."""

    task: str
    metric: str
    filter: str | None = None  # any


class Asking:
    """Evaluations whose result files and samples are kept in a folder.

    Args:
        folder: of the result files; one folder per call below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        lm_eval_editing_autoload.install()

    def scores(
        self,
        lm: EditedHFLM,
        columns: Sequence[TaskColumn],
        settings: Mapping[str, Any],
        *,
        chosen: Sequence[int] | None = None,
        limit: int | None = None,
        chat: bool = False,
        own_tasks_only: bool = True,
    ) -> list[PassportScore]:
        """Evaluate the tasks of columns and return the columns in their order.

        Args:
            settings: of the tasks, as ``data``.
            chosen: numbers of the documents to ask; all by default.
            limit: the first documents alone.
            chat: ask in the model's chat template.
            own_tasks_only: look for tasks in this package alone, which takes less time.

        Raises:
            EditingError: for data that cannot be read, and whatever else an evaluation refuses.
        """
        import lm_eval
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.tasks import TaskManager

        tasks = list(dict.fromkeys(column.task for column in columns))
        self._count += 1
        folder = self.folder / f"{self._count:02d}"
        manager = TaskManager(include_path=str(TASKS_DIR), include_defaults=not own_tasks_only, metadata=dict(settings))
        tracker = EvaluationTracker(output_path=str(folder))
        save_or_fail(tracker)
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=manager,
            samples=None if chosen is None else {task: list(chosen) for task in tasks},
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=chat,
            evaluation_tracker=tracker,
        )
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
        rows = load_results(folder).to_dict("records")
        cases = load_cases(folder).to_dict("records")
        return [_score(column, rows, cases) for column in columns]


def _score(column: TaskColumn, rows: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> PassportScore:
    """A column of result rows as a score, with the unedited model's number and the reasons of its own cases."""
    row = _row(rows, column, column.metric, "")
    if row is None:
        return PassportScore(name=column.metric, task=column.task, value=None, n=0, note=NOT_REPORTED)
    base = _row(rows, column, f"{column.metric}_{UNEDITED}", "") or _row(rows, column, column.metric, UNEDITED)
    found = interval_of(row)
    n = 0 if is_missing(row["n"]) else int(row["n"])
    counts = [0 if is_missing(row[name]) else int(row[name]) for name in ("failed", "excluded")]
    place = (row["task"], row["metric"], row["stage"], row["filter"])
    reasons = Counter(
        str(case["reason"])
        for case in cases
        if case["reason"] and (case["task"], case["metric"], case["stage"], case["filter"]) == place
    )
    if counts[1]:
        reasons[EXCLUDED] = counts[1]
    value = None if is_missing(row["value"]) else float(row["value"])
    note = found.note
    if value is None and not reasons:
        note = note or "no case was scored"
    return PassportScore(
        name=column.metric,
        task=column.task,
        value=value,
        low=None if found.interval is None else found.interval.low,
        high=None if found.interval is None else found.interval.high,
        method="" if found.interval is None else found.interval.method,
        n=n,
        unscored=sum(counts),
        reasons=reasons,
        is_share=bool(row["is_share"]),
        chance=None if is_missing(row["chance"]) else float(row["chance"]),
        before=None if base is None or is_missing(base["value"]) else float(base["value"]),
        note=note,
    )


def _row(rows: Sequence[Mapping[str, Any]], column: TaskColumn, metric: str, stage: str) -> Mapping[str, Any] | None:
    """The row of a column; of several filters the first."""
    for row in rows:
        same = (row["task"], row["metric"], row["stage"]) == (column.task, metric, stage)
        if same and column.filter in (None, row["filter"]):
            return row
    return None


def mean_score(name: str, values: Mapping[str, float], *, before: Mapping[str, float] | None = None) -> PassportScore:
    """Mean over requests of a number that this package measures outside tasks, with a bootstrap interval.

    Args:
        values: request key -> value; values that are not finite count as unscored.
        before: the same before the edit; its mean is over the scored requests, and left out if one has no number.
    """
    import numpy as np

    from lm_edit.results.statistics.intervals import bootstrap_interval

    scored = {key: value for key, value in values.items() if math.isfinite(value)}
    finite, lost = list(scored.values()), len(values) - len(scored)
    if not finite:
        return PassportScore(
            name=name, value=None, n=0, unscored=lost, note="no value is finite" if lost else "no request"
        )
    units = np.stack([np.asarray(finite), np.ones(len(finite))], axis=1)
    interval = bootstrap_interval(units, lambda sums: np.asarray(sums[..., 0] / sums[..., 1]))
    known = [] if before is None else [before[key] for key in scored if math.isfinite(before[key])]
    base = math.fsum(known) / len(known) if len(known) == len(finite) else None  # of the same requests
    return PassportScore(
        name=name,
        value=math.fsum(finite) / len(finite),
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        method="" if interval is None else interval.method,
        n=len(finite),
        unscored=lost,
        reasons={"not finite": lost} if lost else {},
        before=base,
        note="" if interval else "one value, or all are equal",
    )
