"""Indirect fact recovery against connected knowledge preservation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.charts import Chart, Points, Series
from lm_edit.figures.select import (
    UNEDITED,
    caption,
    cell,
    model_panels,
    require_edited,
    require_rows,
    run_labels,
)
from lm_edit.figures.spec import DEFAULTS, FigureSpec, Needs, Options
from lm_edit.figures.thinkedit import BY_METRIC, COMMAND, choose_protocol

if TYPE_CHECKING:
    from pandas import DataFrame

NEEDS = Needs("thinkedit_tradeoff", f"the columns ifr and ckp of a KnowGIC task ({BY_METRIC})", COMMAND)

LAST = -1  # color and marker of the unedited model


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per model, a point per editor; the unedited model is a gray point where its run is among the files."""
    protocol, notes = choose_protocol(rows, NEEDS, options, ("ifr", "ckp"))
    ifr, ckp = f"ifr_{protocol}", f"ckp_{protocol}"
    chosen = require_rows(rows, NEEDS, [ifr, ckp])
    require_edited(chosen, NEEDS)
    names = sorted({label for _, group in model_panels(chosen).items() for label in run_labels(group).values()})
    panels = []
    for model, group in model_panels(chosen).items():
        labels = run_labels(group)
        if not labels:
            continue
        own = group[group["editor"] == UNEDITED]
        labels |= dict.fromkeys(own["run"], UNEDITED)
        points = [
            _point(label, group[group["run"] == run], ifr, ckp, names.index(label) if label in names else LAST)
            for run, label in labels.items()
        ]
        panels.append(
            Points(
                title=model,
                series=points,
                position_label="CKP (higher is better)",
                value_label="IFR (lower is better)",
                named=True,
            )
        )
    note = "The lower right corner is best: the fact is not deducible, and its surroundings are kept."
    title = "Indirect fact recovery against knowledge preservation"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(chosen, notes=[note, *notes]))


def _point(label: str, rows: DataFrame, ifr: str, ckp: str, look: int) -> Series:
    vertical, horizontal = (cell(rows[rows["metric"] == metric]) for metric in (ifr, ckp))
    return Series(
        name=label, values=[vertical.value], positions=[horizontal.value], low=[vertical.low], high=[vertical.high],
        position_low=[horizontal.low], position_high=[horizontal.high], counts=[vertical.n], texts=[label],
        color=look, style=look,
    )  # fmt: skip


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="trade-off between IFR and CKP",
    published="ThinkEdit figure 7",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
)
