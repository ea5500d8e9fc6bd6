"""From synthetic to WILD evaluation, one module of the evaluation at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Chart, Waterfall
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    by_model,
    caption,
    cell,
    require_comparable,
    require_edited,
    series_of,
    value_label,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

# step -> (task, column); {metric} is judge or em
STEPS = {
    "synthetic": ("qaedit_grid_question_only_tf", "efficacy_match"),
    "input: QA instruction": ("qaedit_grid_qa_inst_tf", "efficacy_qa_match"),
    "generation: greedy": ("qaedit_grid_qa_inst_ar_gold", "efficacy_qa_ar_match"),
    "metric: {metric}": ("qaedit_grid_qa_inst_ar_gold", "efficacy_qa_ar_{metric}"),
    "stop: natural": ("qaedit_grid_qa_inst_ar_natural", "efficacy_wild_{metric}"),
}
METRICS = {"judge": "judge", "em": "exact match"}

NEEDS = Needs(
    "wild_grid",
    "the tasks of wild_grid, with a judge (columns _judge) or without one (_em; also by --metric em)",
    "lm_eval --model edited_hf --tasks wild_grid --model_args editor=r_rome --output_path results",
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per run: the synthetic value, the change by each module, the WILD value."""
    metric, notes = _metric(rows, options)
    places = [(task, column.format(metric=metric)) for task, column in STEPS.values()]
    keys = list(zip(rows["task"], rows["metric"], rows["stage"], strict=True))
    chosen = rows[[(task, column) in places and stage == "" for task, column, stage in keys]]
    absent = [
        f"{column} ({task})"
        for task, column in places
        if chosen[(chosen["task"] == task) & (chosen["metric"] == column)].empty
    ]
    if absent:
        raise NEEDS.missing(f"no run has the column {', '.join(absent)}")
    require_comparable(chosen, NEEDS)
    require_edited(chosen, NEEDS)
    panels = []
    for model, group, labels in by_model(chosen):
        for run, label in labels.items():
            own = group[group["run"] == run]
            panels.append(_panel(f"{label}, {model}", own, metric, places))
    title = "From synthetic to WILD evaluation, module by module"
    note = (
        "Synthetic: question alone, teacher forcing, gold length, match ratio. WILD: QA instruction, greedy decoding, "
        f"natural stop, {METRICS[metric]}. Between them, the change by each module; whiskers: of the value after it."
    )
    return Chart(
        name=NEEDS.figure, title=title, panels=panels, caption=caption(chosen, unedited=False, notes=[note, *notes])
    )


def _metric(rows: DataFrame, options: Options) -> tuple[str, list[str]]:
    if options.metric is not None:
        if options.metric not in METRICS:
            raise NEEDS.missing(f"--metric {options.metric} is unknown. Accepted: {', '.join(METRICS)}")
        return options.metric, []
    task, last = STEPS["stop: natural"]
    present = set(rows[rows["task"] == task]["metric"])
    for metric in METRICS:
        if last.format(metric=metric) in present:
            return metric, [] if metric == "judge" else ["Without a judge: exact match in its place."]
    raise NEEDS.missing(f"no run has a column {' or '.join(last.format(metric=name) for name in METRICS)}")


def _panel(title: str, rows: DataFrame, metric: str, places: list[tuple[str, str]]) -> Waterfall:
    cells = [cell(rows[(rows["task"] == task) & (rows["metric"] == column)]) for task, column in places]
    return Waterfall(
        title=title,
        steps=[name.format(metric=METRICS[metric]) for name in STEPS],
        values=series_of("reliability", cells),
        last="WILD",
        value_label=value_label(rows, places[-1][1], "reliability"),
        limits=SHARE,
    )


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="the grid of evaluations as a waterfall from synthetic to WILD",
    published="WILD section 6, tables 4 to 8, as a figure",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
