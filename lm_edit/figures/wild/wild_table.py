"""Synthetic and WILD scores of the same edits by editor, with the mean over editors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from edit_hooks.utils.storage.hashing import key_of
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import MISSING, Cell, by_model, require_edited, require_rows, run_cells
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.wild.wild_gap import BENCHMARKS, metric_pair
from lm_edit.figures.wild.wild_gap import NEEDS as GAP
from lm_edit.results.comparing import SETTINGS

if TYPE_CHECKING:
    from pandas import DataFrame

NEEDS = Needs("wild_table", GAP.columns, GAP.command, further=GAP.further)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Table:
    """A row per run, two columns per model and benchmark, and the mean over the editors that have both values.

    Runs that differ in the seed alone count as one editor, with their mean.

    Editors with another population, data set or judge are refused, as in ``wild_gap``.
    """
    tasks = {name: (f"{name}_syn_reliability", f"{name}_wild_reliability") for name in BENCHMARKS}
    of_tasks = rows[rows["task"].isin([task for pair in tasks.values() for task in pair])]
    synthetic, wild, notes = metric_pair(of_tasks, NEEDS, options)
    chosen = require_rows(of_tasks, NEEDS, [synthetic, wild])
    require_edited(chosen, NEEDS)
    header = ["editor"]
    columns: list[dict[str, Cell]] = []  # by the label of the run
    entries: list[dict[str, str]] = []  # of each two columns
    for benchmark, title in BENCHMARKS.items():
        for model, group, labels in by_model(chosen[chosen["task"].isin(tasks[benchmark])]):
            if set(group["metric"]) != {synthetic, wild}:
                continue
            entries.append(_entries(group, labels))
            for metric, name in ((synthetic, "synthetic"), (wild, "WILD")):
                header.append(f"{title}, {model}, {name}")
                cells = run_cells(group, list(labels), metric, whiskers=False)
                columns.append(dict(zip(labels.values(), cells, strict=True)))
    if not columns:
        raise NEEDS.missing(f"no benchmark has both {synthetic} and {wild}")
    editors = list(dict.fromkeys(label for column in columns for label in column))
    body: list[list[str | int | float]] = [
        [editor, *(_written(column, editor) for column in columns)] for editor in editors
    ]
    mean: list[str | int | float] = ["mean over editors"]
    number: list[str | int | float] = ["editors in the mean"]
    for pair, entry_of in zip(zip(columns[::2], columns[1::2], strict=True), entries, strict=True):
        seeds: dict[str, list[str]] = {}  # entry -> its runs with both values
        for label in editors:
            if all(math.isfinite(_value(column, label)) for column in pair):
                seeds.setdefault(entry_of[label], []).append(label)
        for column in pair:
            means = [math.fsum(_value(column, label) for label in labels) / len(labels) for labels in seeds.values()]
            mean.append(f"{math.fsum(means) / len(means):.3f}" if means else "-")
            number.append(len(means))
    return Table(
        name=NEEDS.figure,
        title=f"{synthetic} and {wild} of the same edits",
        header=header,
        rows=[*body, mean, number],
        notes=[*notes, "The mean is over the editors with both values; the seeds of an editor count as one."],
    )


def _entries(rows: DataFrame, labels: Mapping[str, str]) -> dict[str, str]:
    """Label of a run -> key of all that tells editors apart but the seed."""
    columns = [name for name in SETTINGS if name not in ("seed", "edits")]
    runs = rows.drop_duplicates("run").set_index("run")
    return {label: key_of([str(runs.loc[run, column]) for column in columns]) for run, label in labels.items()}


def _value(column: Mapping[str, Cell], editor: str) -> float:
    return column.get(editor, MISSING).value


def _written(column: Mapping[str, Cell], editor: str) -> str:
    cell = column.get(editor, MISSING)
    return f"{cell.value:.3f}" if math.isfinite(cell.value) else cell.gap


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: reliability under synthetic and under WILD evaluation, with the mean over editors",
    published="WILD tables 1, 3 and 9, reliability",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
    is_table=True,
)
