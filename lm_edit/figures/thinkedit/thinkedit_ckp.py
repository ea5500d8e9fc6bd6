"""Connected knowledge preservation by editor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Bars, Chart
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    MISSING,
    by_model,
    caption,
    require_edited,
    require_rows,
    run_cells,
    series_of,
    unedited_reference,
    value_label,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit.questions import BY_METRIC, COMMAND, choose_protocol

if TYPE_CHECKING:
    from pandas import DataFrame

NEEDS = Needs("thinkedit_ckp", f"the column ckp of a KnowGIC task ({BY_METRIC})", COMMAND)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A group of bars per editor, a bar per model."""
    protocol, notes = choose_protocol(rows, NEEDS, options, ("ckp",))
    metric = f"ckp_{protocol}"
    chosen = require_rows(rows, NEEDS, [metric])
    require_edited(chosen, NEEDS)
    values = {
        model: dict(zip(labels.values(), run_cells(group, list(labels), metric), strict=True))
        for model, group, labels in by_model(chosen)
    }
    names = sorted({name for cells in values.values() for name in cells})
    series = [
        series_of(model, [cells.get(name, MISSING) for name in names], color=index)
        for index, (model, cells) in enumerate(values.items())
    ]
    panel = Bars(
        title=next(iter(values)) if len(values) == 1 else "",
        categories=names,
        series=series,
        value_label=value_label(chosen, metric, "CKP"),
        references=unedited_reference(chosen, metric),
    )
    note = "Facts around the edited one keep their answers where CKP is high. The unedited model has 1 by definition."
    title = "Connected knowledge preservation"
    return Chart(name=NEEDS.figure, title=title, panels=[panel], caption=caption(chosen, notes=[note, *notes]))


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="connected knowledge preservation (CKP) by editor",
    published="ThinkEdit figure 6",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
