"""One Markdown table from several runs: a row per metric or per number of the edits, a column per run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.filters import filter_rows
from lm_edit.results.runs import Paths
from lm_edit.results.schema import SAME_COLUMN
from lm_edit.results.statistics.intervals import Interval
from lm_edit.results.statistics.of_rows import describe_intervals, interval_of
from lm_edit.results.tables import load_results
from lm_eval_tasks.report.model_parts import differing_parts

PLACE = ["task", "metric", "stage", "filter"]
CONDITIONS = SAME_COLUMN | {"limit": "--limit", "samples": "choice of --samples"}
MAX_NAMED = 3  # rows that a note names
# Columns that distinguish runs with the same heading, in the order in which they are tried.
DISTINCTIONS = (
    "model", "model_parts", "editor", "settings", "limit", "samples", "seed", "edit_batch_size", "group_size",
    "edit_options", "answer_options", "run",
)  # fmt: skip


class Comparison(NamedTuple):
    """A table of several runs.

    Attributes:
        rows: the header first.
        notes: sentences about the intervals, and about the rows whose columns cannot be compared.
    """

    rows: list[list[str]]
    notes: list[str]


def comparison(paths: Paths, metrics: Sequence[str] = (), only: Sequence[str] = ()) -> Comparison:
    """One table of several runs.

    A column heading is editor (its label if it has one), mode, number of edits and data, with the settings where runs
    would share it. A cell is the value, its 95% interval (after ``~`` that of the normal approximation), and in
    parentheses the number of scored cases, of excluded ones, of failures with the value if they count as 0, and of
    cases that are unscored for another reason.

    Args:
        metrics: only these, in this order, each with or without its stage (``efficacy_prob@immediate``).

    Raises:
        EditingError: as ``load_results``; for an unknown metric; and for runs with two results of one metric.
    """
    frame = filter_rows(load_results(paths), only).copy()
    frame["shown"] = [f"{row.metric}@{row.stage}" if row.stage else row.metric for row in frame.itertuples()]
    frame = _chosen(frame, metrics)
    if frame.empty:
        raise EditingError("these runs have no results: their tasks report no metric.")
    _refuse_two_results(frame)
    runs = {run: rows.iloc[0] for run, rows in frame.groupby("run", sort=False)}
    named = _headings(runs)
    several = {task for task, rows in frame.groupby("task") if rows["filter"].nunique() > 1}
    table = [["task", "metric", *named.values()]]
    rows = frame.to_dict("records")
    estimates = [interval_of(row) for row in rows]
    cells = {
        (row["run"], *(row[name] for name in PLACE)): _cell(row, found.interval)
        for row, found in zip(rows, estimates, strict=True)
    }
    order = (
        frame.drop_duplicates(PLACE) if metrics else frame.drop_duplicates(PLACE).sort_values("order", kind="stable")
    )
    for _, row in order.iterrows():
        name = row["shown"] + (f" ({row['filter']})" if row["task"] in several else "")
        place = tuple(row[name] for name in PLACE)
        table.append([row["task"], name, *(cells.get((run, *place), "") for run in runs)])
    intervals = describe_intervals(estimates)
    return Comparison(table, [*([f"{intervals}."] if intervals else []), *_differences(frame, named)])


def transposed(table: Comparison) -> Comparison:
    """The table with a row per run, and a column per task and metric."""
    header, *rows = table.rows
    runs = zip(header[2:], *(cells for _, _, *cells in rows), strict=True)
    return table._replace(rows=[["run", *(f"{task}: {name}" for task, name, *_ in rows)], *map(list, runs)])


def edits_comparison(paths: Paths, only: Sequence[str] = ()) -> Comparison:
    """One table about the edits of several runs.

    A row is one entry of the column ``edit`` of the results, such as ``seconds_per_edit``; tasks with equal entries, as
    those of one run have, share it.

    Raises:
        EditingError: as ``load_results``; for runs without edits, and for those with two results of one metric.
    """
    frame = filter_rows(load_results(paths), only)
    _refuse_two_results(frame)
    runs = {run: rows.iloc[0] for run, rows in frame.groupby("run", sort=False)}
    entries: dict[str, dict[str, list[str]]] = {}  # task -> name of an entry -> its value in each run
    for task, rows in frame.groupby("task", sort=False):
        summaries = {row["run"]: row["edit"] for _, row in rows.iterrows() if row["edit"]}
        names = dict.fromkeys(name for summary in summaries.values() for name in summary)
        entries[task] = {name: [_entry(summaries.get(run, {}).get(name)) for run in runs] for name in names}
    if not any(entries.values()):
        raise EditingError("these runs have no edits; they are of unedited models, or of lm-eval's own tasks.")
    table = [["task", "edits", *_headings(runs).values()]]
    shared: dict[str, list[str]] = {}
    for task, values in entries.items():
        shared.setdefault(json.dumps(values), []).append(task)
    for tasks in shared.values():
        for name, cells in entries[tasks[0]].items():
            table.append([", ".join(tasks), name, *cells])
    return Comparison(table, [])


def _entry(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _chosen(frame: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """The rows to show, in order; tasks keep the order of their first run."""
    tasks = {task: number for number, task in enumerate(dict.fromkeys(frame["task"]))}
    frame["order"] = frame["task"].map(tasks)
    if not metrics:
        return frame
    known = {*frame["metric"], *frame["shown"]}
    for name in metrics:
        if name not in known:
            raise EditingError(f"no run has a metric named {name!r}.{near_misses(name, known)}")
    wanted = [frame[(frame["metric"] == name) | (frame["shown"] == name)] for name in metrics]
    chosen = pd.concat(wanted)
    return chosen[~chosen.index.duplicated()]


def _refuse_two_results(frame: pd.DataFrame) -> None:
    """Refuse runs whose results of one metric differ in data, judge, protocol or version."""
    twice = frame[frame.duplicated(["run", *PLACE], keep=False)]
    if twice.empty:
        return
    first = twice.iloc[0]
    same = twice[(twice[["run", *PLACE]] == first[["run", *PLACE]]).all(axis=1)]
    different = [
        name for name in ("task_version", "data_hash", "protocol", "judge", "population") if same[name].nunique() > 1
    ]
    files = ", ".join(dict.fromkeys(same["file"]))
    raise EditingError(
        f"run {first['run_name']} has two results of {first['task']}, {first['metric']}, with different "
        f"{' and '.join(different)}: {files}. Show these files separately."
    )


def _differences(frame: pd.DataFrame, named: dict[str, str]) -> Iterator[str]:
    """Sentences about the rows whose runs differ in one of :data:`CONDITIONS`, one for each way in which they do."""
    rows_of: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for (task, metric, *_), rows in frame.groupby(PLACE, sort=False):
        for name in CONDITIONS:
            values = {run: _text(value) for run, value in zip(rows["run"], rows[name], strict=True)}
            if len(set(values.values())) > 1:
                rows_of.setdefault((name, tuple(values.items())), []).append(f"{task}, {metric}")
    for (name, of_runs), places in rows_of.items():
        more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
        runs = "; ".join(f"{named[run]}: {value}" for run, value in of_runs)
        yield f"Not comparable ({'; '.join(places[:MAX_NAMED])}{more}): another {CONDITIONS[name]}. {runs}"


def _text(value: Any) -> str:
    return "none" if value in ("", None) or value != value else f"{value:g}" if isinstance(value, float) else str(value)


def _headings(runs: dict[str, Any]) -> dict[str, str]:
    """Run -> heading; runs with equal ones are distinguished by :data:`DISTINCTIONS`."""
    parts = differing_parts(row["model_parts"] for row in runs.values())

    def heading(row: Any, *more: str) -> str:
        size = f", {row['num_edits']:g} edits" if not math.isnan(row["num_edits"]) else ""
        mode = f", {row['mode']}" if row["mode"] not in ("", "none") else ""
        context = f", icl={row['icl']}" if row["icl"] != "no" else ""
        data = f" ({row['data']})" if row["data"] else ""
        further = (parts[row[name]] if name == "model_parts" else _distinction(row, name) for name in more)
        editor = row["editor_label"] or row["editor"]
        return editor + mode + size + context + "".join(f", {text}" for text in further if text) + data

    more: list[str] = []
    named = {run: heading(row) for run, row in runs.items()}
    for name in DISTINCTIONS:
        longer = {run: heading(row, *more, name) for run, row in runs.items()}
        if len(set(longer.values())) > len(set(named.values())):
            more, named = [*more, name], longer
    return named


def _distinction(row: Any, name: str) -> str:
    if name in ("settings", "editor", "model", "edit_options", "answer_options", "run"):
        return row[name] or f"no {name.replace('_', ' ')}"
    if name == "samples":
        return f"--samples {row[name]}" if row[name] else "no --samples"
    return f"{name} {'none' if math.isnan(row[name]) else format(row[name], 'g')}"


def _cell(row: Any, interval: Interval | None) -> str:
    value = "unscored" if math.isnan(row["value"]) else f"{row['value']:.3f}"
    mark = "~" if interval and interval.method == "normal approximation" else ""
    ends = f", {mark}{interval.low:.3f} to {interval.high:.3f}" if interval else ""
    counts = [] if math.isnan(row["n"]) else [f"{row['n']:g}"]
    if row["excluded"] > 0:
        counts.append(f"{row['excluded']:g} excluded")
    zeroed = 0 if math.isnan(row["zeroed"]) else row["zeroed"]
    if zeroed:
        counts += [f"{zeroed:g} failed", f"{row['or_0']:.3f} with them as 0"]
    if row["failed"] > zeroed:
        counts.append(f"{row['failed'] - zeroed:g} unscored")
    if math.isnan(row["zeroed"]) and not math.isnan(row["or_0"]) and row["or_0"] != row["value"]:
        counts.append(f"{row['or_0']:.3f} with failures as 0")  # an older file, which has no number of them
    return value + ends + (f" ({', '.join(counts)})" if counts else "")
