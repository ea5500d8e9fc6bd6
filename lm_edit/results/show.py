"""One Markdown table from several runs: a row per metric or per number of the edits, a column per run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.comparing import SAME_CASES, SAME_SCORE, differences, run_labels, shared_facts
from lm_edit.results.files.runs import Paths
from lm_edit.results.filters import filter_rows
from lm_edit.results.statistics.intervals import Interval
from lm_edit.results.statistics.of_rows import describe_intervals, interval_of
from lm_edit.results.tables import load_results

PLACE = ["task", "metric", "stage", "filter"]
CONDITIONS = SAME_SCORE | SAME_CASES
MAX_NAMED = 3  # rows that a note names


class Comparison(NamedTuple):
    """A table of several runs.

    Attributes:
        rows: the header first.
        notes: sentences about facts that the runs share, the intervals, and rows whose columns cannot be compared.
    """

    rows: list[list[str]]
    notes: list[str]


def comparison(paths: Paths, metrics: Sequence[str] = (), only: Sequence[str] = ()) -> Comparison:
    """One table of several runs.

    A column heading is the label of its run. A cell is the value, its 95% interval (after ``~`` that of the normal
    approximation), and in parentheses the number of scored cases, of excluded ones, of failures with the value if they
    count as 0, and of cases that are unscored for another reason.

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
    labels = run_labels(frame)
    several = {task for task, rows in frame.groupby("task") if rows["filter"].nunique() > 1}
    table = [["task", "metric", *labels.values()]]
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
        table.append([row["task"], name, *(cells.get((run, *place), "") for run in labels)])
    intervals = describe_intervals(estimates)
    notes = [shared_facts(frame), f"{intervals}." if intervals else "", *_notes(frame, labels)]
    return Comparison(table, [note for note in notes if note])


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
    labels = run_labels(frame)
    entries: dict[str, dict[str, list[str]]] = {}  # task -> name of an entry -> its value in each run
    for task, rows in frame.groupby("task", sort=False):
        summaries = {row["run"]: row["edit"] for _, row in rows.iterrows() if row["edit"]}
        names = dict.fromkeys(name for summary in summaries.values() for name in summary)
        entries[task] = {name: [_entry(summaries.get(run, {}).get(name)) for run in labels] for name in names}
    if not any(entries.values()):
        raise EditingError("these runs have no edits; they are of unedited models, or of lm-eval's own tasks.")
    table = [["task", "edits", *labels.values()]]
    shared: dict[str, list[str]] = {}
    for task, values in entries.items():
        shared.setdefault(json.dumps(values), []).append(task)
    for tasks in shared.values():
        for name, cells in entries[tasks[0]].items():
            table.append([", ".join(tasks), name, *cells])
    return Comparison(table, list(filter(None, [shared_facts(frame)])))


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


def _notes(frame: pd.DataFrame, labels: Mapping[str, str]) -> Iterator[str]:
    """Sentences about the metrics whose runs differ in one of :data:`CONDITIONS`, one for each way in which they do."""
    places: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for found in differences(frame, PLACE, CONDITIONS):
        places.setdefault((found.condition, found.values), []).append(", ".join(found.place[:2]))
    for (name, of_runs), names in places.items():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        runs = "; ".join(f"{labels[run]}: {value or 'none'}" for run, value in of_runs)
        yield f"Not comparable ({'; '.join(names[:MAX_NAMED])}{more}): another {CONDITIONS[name]}. {runs}"


def _cell(row: Any, interval: Interval | None) -> str:
    value = "unscored" if math.isnan(row["value"]) else f"{row['value']:.3f}"
    ends = f", {interval.mark}{interval.low:.3f} to {interval.high:.3f}" if interval else ""
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
