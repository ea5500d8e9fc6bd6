"""Parts of result files as tables: re-evaluation matrices and steps of streams, scores by a field of the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import parse_json
from lm_edit.results.files.shape import COUNT, NUMBER, Shape, as_saved, each, fields, listed, maybe
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.schema import BREAKDOWN_COLUMNS, RETENTION_COLUMNS, SCHEMA_VERSION, STEP_COLUMNS
from lm_edit.results.tables import ResultSet, Source, make_frame
from lm_eval_tasks.common.scoring.columns import MetricColumn, read_columns
from lm_eval_tasks.common.task.stages import RETENTION

_MATRIX = fields(
    {"matrix": listed(listed(maybe(NUMBER))), "num_steps": COUNT, "steps_shown": maybe(listed(COUNT))},
    required=("matrix", "num_steps"),
)
_STEPS = listed(
    fields(
        {"step": COUNT, "num_edits": maybe(COUNT), "norm_ratio": maybe(NUMBER), "probe_loss": maybe(NUMBER)},
        required=("step",),
    )
)
_GROUPS = each(fields({"value": maybe(NUMBER), "n": maybe(COUNT)}))


def load_retention(paths: Source) -> pd.DataFrame:
    """One row per run, task, metric, filter, step and earlier step: R[step][edited_at] (figure 5 of WILD).

    Raises:
        EditingError: as ``load_results``.
    """
    rows = []
    for about, column, content in _texts(paths):
        if column.stage == RETENTION and content:
            where = _check(about, column, content, _MATRIX)
            shown = content.get("steps_shown") or range(content["num_steps"])
            place = _result(about, column)
            with as_saved(f"{where}: the steps of a stream, with a row of scores for each, are needed"):
                steps = list(zip(shown, content["matrix"], strict=True))
            for step, values in steps:
                cells = zip(shown, values, strict=False)  # the lower triangle
                rows += [{**place, "step": step, "edited_at": at, "value": value} for at, value in cells]
    return _frame(rows, RETENTION_COLUMNS)


def load_breakdown(paths: Source) -> pd.DataFrame:
    """One row per run, task, metric, filter, field and group, of runs with ``score_by``.

    Raises:
        EditingError: as ``load_results``.
    """
    rows = []
    for about, column, content in _texts(paths):
        for metric in about.metrics:
            if column.metric.startswith(f"{metric}_by_") and not column.stage:
                _check(about, column, content, _GROUPS)
                field = column.metric.removeprefix(f"{metric}_by_")
                place = {**_result(about, replace(column, metric=metric)), "field": field}
                rows += [{**place, "group": group, **cell} for group, cell in content.items()]
    return _frame(rows, BREAKDOWN_COLUMNS)


def load_steps(paths: Source) -> pd.DataFrame:
    """One row per run and step of a stream: how far its weights moved, and the loss on a plain sentence.

    Of several files of one run the newest one with steps counts.

    Raises:
        EditingError: as ``load_results``; for steps of another form.
    """
    newest: dict[str, list[dict[str, Any]]] = {}
    for file in ResultSet.of(paths).files:
        saved = (file.content["config"].get("edited_hf") or {}).get("steps")
        if saved:
            if problem := _STEPS(saved, "config.edited_hf.steps"):
                raise EditingError(f"{file.path}: {problem}.")
            of_run = {"run": file.facts.run, "file": str(file.path)}
            names = list(STEP_COLUMNS)[2:]
            newest[file.facts.run] = [{**of_run, **{name: one.get(name) for name in names}} for one in saved]
    return _frame([row for rows in newest.values() for row in rows], STEP_COLUMNS)


def _check(about: TaskFacts, column: MetricColumn, content: object, shape: Shape) -> str:
    """Check the content of a text, and return its place."""
    where = f"{about.file.path}, {about.task}, {column.name}"
    if problem := shape(content, ""):
        raise EditingError(f"{where}: {problem}.")
    return where


def _result(about: TaskFacts, column: MetricColumn) -> dict[str, Any]:
    """The columns that name a result; others of it are left out of the tables."""
    of_file = {"run": about.file.facts.run, "file": str(about.file.path)}
    return {**of_file, **about.columns, **about.of_metric(column)}


def _texts(paths: Source) -> Iterator[tuple[TaskFacts, MetricColumn, dict[str, Any]]]:
    """The columns whose value is a JSON object."""
    current = ResultSet.of(paths)
    for file, task in current.places:
        about = TaskFacts(file, task)
        saved = {key: value for key, value in file.tasks[task].items() if "," in key}
        for column in read_columns(saved, about.metrics):
            if isinstance(column.value, str) and column.value.startswith("{"):
                metric = next(
                    (name for name in about.metrics if column.metric.startswith(f"{name}_by_")), column.metric
                )
                if not current.counts(file, about, metric, column.filter):
                    continue
                where = f"{file.path}, {task}, {column.name}"
                content = parse_json(column.value, where, finite=False, halves="replace")
                if not isinstance(content, dict):
                    raise EditingError(f"{where}: a JSON object is needed.")
                yield about, column, content


def _frame(rows: list[dict[str, Any]], columns: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    frame = make_frame(rows, columns)
    frame.attrs["schema_version"] = SCHEMA_VERSION
    return frame
