"""Edits asked in three ways: by the likelihood of given answers, by free generation, and in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import SHARE, Bars, Chart, Reference
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.select import (
    Cell,
    by_model,
    caption,
    first_metric,
    require_edited,
    require_rows,
    run_cells,
    series_of,
    unedited_reference,
    with_unedited,
)
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.wild.wild_gap import WILD

if TYPE_CHECKING:
    from pandas import DataFrame

FREE_TASK = "qaedit_wild_reliability"
GIVEN, REVERSE = ("bake_es", "efficacy_prob"), ("bake_rq", "reverse_qa_prob")
COLORS = (5, 3, 2)
TITLE = "Edits, asked in three ways"

NEEDS = Needs(
    "answer_gap",
    f"the columns {GIVEN[1]} of {GIVEN[0]}, {REVERSE[1]} of {REVERSE[0]}, and {' or '.join(WILD)} (or another one by "
    f"--metric) of {FREE_TASK}",
    "lm_eval --model edited_hf --tasks bake_es,bake_rq,qaedit_wild --model_args editor=r_rome --output_path results",
    further="with --metadata judge=<judge> for verdicts on the free answers",
)


def three_bars(
    title: str, editors: Sequence[str], cells: Sequence[Sequence[Cell]], free: str, references: Sequence[Reference] = ()
) -> Bars:
    """A panel with three bars per editor.

    Args:
        cells: of the three questions in the order of :func:`names_of`, each one per editor.
        free: the column of the free answers.
    """
    series = [series_of(name, own, color=color) for name, own, color in zip(names_of(free), cells, COLORS, strict=True)]
    return Bars(
        title=title,
        categories=list(editors),
        series=series,
        value_label="share of edits (higher is better)",
        references=references,
        limits=SHARE,
    )


def names_of(free: str) -> tuple[str, str, str]:
    """The questions, for the legend."""
    how = free.removeprefix("efficacy_wild_").partition("@")[0].replace("em", "exact match")
    return "likelihood: new answer likelier than the old", f"free answer ({how})", "the same fact in reverse"


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per model, three bars per editor."""
    free, notes = first_metric(rows[rows["task"] == FREE_TASK], NEEDS, options, WILD)
    columns = (GIVEN, (FREE_TASK, free), REVERSE)
    of_tasks = rows[[place in columns for place in zip(rows["task"], rows["metric"], strict=True)]]
    chosen = require_rows(of_tasks, NEEDS, [metric for _, metric in columns])
    require_edited(chosen, NEEDS)
    panels = []
    for model, group, labels in by_model(chosen):
        cells = [run_cells(group, list(labels), metric) for _, metric in columns]
        references = [
            reference
            for (_, metric), name, color in zip(columns, names_of(free), COLORS, strict=True)
            for reference in unedited_reference(group, metric, f"unedited, {name.partition(':')[0]}", color)
        ]
        panels.append(three_bars(model, list(labels.values()), cells, free, references))
    shown = caption(with_unedited(chosen, rows[rows.index.isin(chosen.index)]), notes=notes)
    return Chart(name=NEEDS.figure, title=TITLE, panels=panels, caption=shown)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="the edited prompt with the answer given, free answers, and reverse questions, by editor",
    published="BAKE and WILD, their main results side by side",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
