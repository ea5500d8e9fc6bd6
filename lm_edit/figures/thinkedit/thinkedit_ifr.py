"""Indirect fact recovery by the length of the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Chart, Lines
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    by_model,
    caption,
    cell,
    require_edited,
    require_rows,
    run_looks,
    series_of,
    unedited_reference,
    value_label,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit.questions import BY_METRIC, COMMAND, choose_protocol

if TYPE_CHECKING:
    from pandas import DataFrame

LENGTHS = (1, 2, 3, 4, 5)

NEEDS = Needs("thinkedit_ifr", f"the columns ifr_1 to ifr_5 of a KnowGIC task ({BY_METRIC})", COMMAND)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per model, a line per editor."""
    protocol, notes = choose_protocol(rows, NEEDS, options, ("ifr_1", "ifr"))
    metrics = {f"ifr_{length}_{protocol}": length for length in LENGTHS}
    present = set(rows["metric"])
    chosen = require_rows(rows, NEEDS, [metric for metric in metrics if metric in present])
    require_edited(chosen, NEEDS)
    models = by_model(chosen)
    looks = run_looks(rows, models)
    panels: list[Lines] = []
    for model, group, labels in models:
        series = []
        for run, label in labels.items():
            own = group[group["run"] == run]
            cells = {
                length: cell(own[own["metric"] == metric]) for metric, length in metrics.items() if metric in present
            }
            look = looks[label]
            series.append(series_of(label, list(cells.values()), positions=list(cells), color=look, style=look))
        panels.append(
            Lines(
                title=model,
                series=series,
                position_label="steps of the chain",
                value_label=value_label(group, group.iloc[0]["metric"], "IFR"),
                references=unedited_reference(rows[rows["model"] == model], f"ifr_{protocol}"),
                whole_positions=True,
            )
        )
    note = "The original fact is no longer deducible where IFR is low. The unedited model has 1 by definition."
    title = "Indirect fact recovery by length of the chain"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(chosen, notes=[note, *notes]))


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="indirect fact recovery (IFR) by length of the chain",
    published="ThinkEdit figure 5",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
