"""The columns of editing tasks that lm-eval's table has: at most eight per benchmark, those that papers print first.

A metric list declares the place of a column among the printed ones of its benchmark's papers (``headline: 2``). Of
several columns of a task with one place the last one with a value counts, as the judge's verdict after exact match.
A task without such a column has its first one. Where these leave room, the earlier stages of a stream follow, and in a
run of one task of a benchmark its other columns. ``LM_EDIT_TABLE=all`` prints all columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_tasks.common.scoring.columns import SUMMARIES, MetricColumn, read_columns
from lm_eval_tasks.common.scoring.metric_list import declared_metrics
from lm_eval_tasks.report.run_facts import is_editing_task

MAX_COLUMNS = 8
VARIABLE, ALL = "LM_EDIT_TABLE", "all"
LAST = 1000  # place of a column that no paper prints


class PrintedColumn(NamedTuple):
    """A column of a task, and its place among those of its benchmark."""

    place: int
    task: str
    column: MetricColumn


def prints_all() -> bool:
    """Whether the table has all columns."""
    return os.environ.get(VARIABLE, "").strip().lower() == ALL


def columns_of(saved: Mapping[str, Any]) -> list[MetricColumn]:
    """The metrics of a task at all stages and in all filter pipelines."""
    columns = {key: value for key, value in saved.items() if "," in key}
    return [column for column in read_columns(columns) if column.metric not in SUMMARIES]


def printed_columns(results: Mapping[str, Any]) -> dict[str, list[PrintedColumn]]:
    """Editing task -> the columns to print, in their order."""
    by_benchmark: dict[str, list[str]] = {}
    for task in results["results"]:
        config = results.get("configs", {}).get(task, {})
        if is_editing_task(config):
            by_benchmark.setdefault(str(config.get("custom_dataset") or task.partition("_")[0]), []).append(task)
    chosen: dict[str, list[PrintedColumn]] = {}
    for tasks in by_benchmark.values():
        for one in _of_benchmark(results, tasks):
            chosen.setdefault(one.task, []).append(one)
        for task in tasks:
            chosen.setdefault(task, [])
    return chosen


def _of_benchmark(results: Mapping[str, Any], tasks: Sequence[str]) -> list[PrintedColumn]:
    by_task = {task: _placed(results, task) for task in tasks}
    if prints_all():
        return [one for columns in by_task.values() for one in columns]
    heads = {task: _heads(columns) for task, columns in by_task.items()}
    first = sorted((columns[0] for columns in heads.values() if columns), key=lambda one: (one.place, one.task))
    rest = sorted((one for columns in heads.values() for one in columns[1:]), key=lambda one: (one.place, one.task))
    kept = [*first, *rest][:MAX_COLUMNS]
    heads_kept = {(one.task, one.column.metric, one.column.filter) for one in kept}
    every = [one for columns in by_task.values() for one in columns if one not in kept and not _is_json(one.column)]
    staged = [one for one in every if one.column.stage]
    further = [one for one in staged if (one.task, one.column.metric, one.column.filter) in heads_kept]
    if len(tasks) == 1:
        further += [one for one in every if not one.column.stage]
    return sorted([*kept, *further][:MAX_COLUMNS], key=lambda one: (one.place, one.task))


def _is_json(column: MetricColumn) -> bool:
    """Whether a column is a JSON text, as scores by a field, which has a row for each of its numbers."""
    return isinstance(column.value, str) and column.value.startswith("{")


def _placed(results: Mapping[str, Any], task: str) -> list[PrintedColumn]:
    """The columns of a task: those of papers, then the others as listed; each before its earlier stages."""
    declared = declared_metrics(results.get("configs", {}).get(task, {}))
    listed = {name: number for number, name in enumerate(declared)}

    def place(column: MetricColumn) -> tuple[int, int]:
        headline = declared.get(column.metric, {}).get("headline")
        return LAST if headline is None else int(headline), listed.get(column.metric, len(listed))

    columns = sorted(columns_of(results["results"][task]), key=lambda one: (*place(one), bool(one.stage)))
    return [PrintedColumn(place(column)[0], task, column) for column in columns]


def _heads(columns: Sequence[PrintedColumn]) -> list[PrintedColumn]:
    """The final columns of a task that papers print, one for each place; without such, its first column."""
    final = [one for one in columns if not one.column.stage]
    by_place: dict[int, PrintedColumn] = {}
    for one in final:
        if one.place < LAST and (one.column.value is not None or one.place not in by_place):
            by_place[one.place] = one
    return list(by_place.values()) or final[:1]


def num_left_out(results: Mapping[str, Any], chosen: Mapping[str, Sequence[PrintedColumn]]) -> int:
    """The number of columns of editing tasks that the table lacks."""
    return sum(len(columns_of(results["results"][task])) - len(columns) for task, columns in chosen.items())


class PlacedName(str):
    """A text with its own order: lm-eval sorts the tasks of its table, and the rows of each, by name."""

    place: tuple[Any, ...]

    @classmethod
    def of(cls, text: str, *place: Any) -> PlacedName:
        """The text at a place; places are compared as tuples."""
        name = cls(text)
        name.place = place
        return name

    def __lt__(self, other: str) -> bool:
        return self.place < _place_of(other)

    def __gt__(self, other: str) -> bool:
        return self.place > _place_of(other)


def _place_of(name: str) -> tuple[Any, ...]:
    return name.place if isinstance(name, PlacedName) else (name, 0)


def in_order(names: Sequence[str], chosen: Mapping[str, Sequence[PrintedColumn]]) -> Iterator[str]:
    """The names of tasks and groups: editing tasks that are neighbors by name are in the order of their columns."""
    for name in names:
        columns = chosen.get(name)
        if columns is None:
            yield PlacedName.of(name, name, 0)
        else:
            yield PlacedName.of(name, _anchor(name, chosen), min((one.place for one in columns), default=LAST), name)


def _anchor(task: str, chosen: Mapping[str, Sequence[PrintedColumn]]) -> str:
    """The first task, by name, of the same family, whose place all of them take."""
    family = task.partition("_")[0]
    return min(name for name in chosen if name.partition("_")[0] == family)
