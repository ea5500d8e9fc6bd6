"""Earlier edits of a stream scored again after every later step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Chart, HeatMap
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import caption, edited, edited_labels, first_metric, require_comparable, value_label
from lm_edit.figures.spec import FigureSpec
from lm_edit.results.filters import MATRIX, places_of, rows_at

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = ("efficacy_wild_judge", "efficacy_wild_em", "efficacy_wild_contains")

NEEDS = Needs(
    "wild_retention",
    f"streams with retention=true, and their samples: the column {' or '.join(METRICS)} (or another one by --metric)",
    "lm_eval --model edited_hf --tasks qaedit_wild_reliability --log_samples --output_path results --model_args "
    "editor=memit,mode=sequential,edits=qaedit,num_edits=20,edit_batch_size=4,retention=true",
)


def draw(rows: DataFrame, retention: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A matrix per run and task: the score of each step's cases after every step.

    Args:
        rows: results; they name the runs.
        retention: a row per result, step and step of the edit, as ``load_retention`` returns them.
    """
    scored = rows[rows["run"].isin(set(retention["run"]))]
    metric, notes = first_metric(scored, NEEDS, options, METRICS)
    chosen = edited(scored[(scored["metric"] == metric) & (scored["stage"] == "")])
    chosen = rows_at(chosen, MATRIX, places_of(retention, MATRIX))
    require_comparable(chosen, NEEDS)
    panels = []
    labels = edited_labels(chosen)
    for _, row in sorted(chosen.iterrows(), key=lambda entry: labels[entry[1]["run"]]):
        own = rows_at(retention, MATRIX, [tuple(row[list(MATRIX)])])
        title = f"{labels[row['run']]}, {row['model']}, {row['task']}"
        panels.append(_matrix(own, title, row["is_rate"], value_label(chosen, metric)))
    if not panels:
        raise NEEDS.missing(f"no run has {metric}@retention")
    note = "A row is the model after that step, a column the cases edited in that step; without intervals."
    sentences = caption(chosen, unedited=False, whiskers=False, notes=[*notes, note])
    return Chart(name=NEEDS.figure, title="Earlier edits after later ones", panels=panels, caption=sentences)


def _matrix(rows: DataFrame, title: str, is_rate: bool, label: str) -> HeatMap:
    steps = sorted(set(map(int, rows["step"])))
    values = {(int(row["step"]), int(row["edited_at"])): float(row["value"]) for _, row in rows.iterrows()}
    matrix = [[values.get((step, column), math.nan) for column in steps if column <= step] for step in steps]
    finite = [value for line in matrix for value in line if not math.isnan(value)]
    return HeatMap(
        title=title,
        rows=[str(step + 1) for step in steps],
        columns=[str(step + 1) for step in steps],
        values=matrix,
        row_label="after step",
        column_label="edited in step",
        value_label=label,
        limits=SHARE if is_rate or not finite else (min(0.0, *finite), max(finite)),
        annotated=len(steps) <= 12,
    )


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="earlier edits of a stream scored again after every later step",
    published="WILD figure 5",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), inputs.retention(), options),
    options=("metric",),
)
