"""Indirect fact recovery against connected knowledge preservation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Chart, Points, Series
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    UNEDITED,
    by_model,
    caption,
    cell,
    require_edited,
    require_rows,
    run_looks,
    value_label,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit.questions import BY_METRIC, COMMAND, choose_protocol

if TYPE_CHECKING:
    from pandas import DataFrame

NEEDS = Needs("thinkedit_tradeoff", f"the columns ifr and ckp of a KnowGIC task ({BY_METRIC})", COMMAND)

# More points, longer names in characters, or points nearer to each other in shares of both axes have a legend.
MAX_NAMED, LONGEST_NAME, NEAREST = 12, 24, (0.12, 0.06)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per model, a point per editor; the unedited model is a gray point where its run is among the files."""
    protocol, notes = choose_protocol(rows, NEEDS, options, ("ifr", "ckp"))
    ifr, ckp = f"ifr_{protocol}", f"ckp_{protocol}"
    chosen = require_rows(rows, NEEDS, [ifr, ckp])
    require_edited(chosen, NEEDS)
    models = by_model(chosen)
    looks = run_looks(rows, models)
    panels: list[Points] = []
    for model, group, labels in models:
        own = group[group["editor"] == UNEDITED]
        points = [
            _point(label, group[group["run"] == run], ifr, ckp, looks.get(label))
            for run, label in (labels | dict.fromkeys(own["run"], UNEDITED)).items()
        ]
        panels.append(
            Points(
                title=model,
                series=points,
                position_label=value_label(group, ckp, "CKP"),
                value_label=value_label(group, ifr, "IFR"),
                named=len(looks) <= MAX_NAMED and max(map(len, looks)) <= LONGEST_NAME and _are_apart(points),
            )
        )
    note = "The lower right corner is best: the fact is not deducible, and its surroundings are kept."
    title = "Indirect fact recovery against knowledge preservation"
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=caption(chosen, notes=[note, *notes]))


def _are_apart(points: Sequence[Series]) -> bool:
    """Whether a name beside each point covers no other one's."""
    places = [(point.positions[0], point.values[0]) for point in points]
    places = [place for place in places if not any(map(math.isnan, place))]
    spans = [max(axis) - min(axis) or 1.0 for axis in zip(*places, strict=True)]
    return not any(
        all(abs(a - b) < least * span for a, b, least, span in zip(one, other, NEAREST, spans, strict=True))
        for one, other in itertools.combinations(places, 2)
    )


def _point(label: str, rows: DataFrame, ifr: str, ckp: str, look: int | None) -> Series:
    vertical, horizontal = (cell(rows[rows["metric"] == metric]) for metric in (ifr, ckp))
    return Series(
        name=label, values=[vertical.value], positions=[horizontal.value], low=[vertical.low], high=[vertical.high],
        position_low=[horizontal.low], position_high=[horizontal.high], counts=[vertical.n], texts=[label],
        color=look, style=look or 0,
    )  # fmt: skip


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="trade-off between IFR and CKP",
    published="ThinkEdit figure 7",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
