"""Kinds of free answers to reverse questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.bake.bake_logprob import DESIRED, ORIGINAL
from lm_edit.figures.bake.reverse_questions import TASK, by_form, form_notes, rows_of
from lm_edit.figures.drawing.charts import SHARE, Bars, Chart, Series
from lm_edit.figures.needs import Needs
from lm_edit.figures.select import (
    UNEDITED,
    Cell,
    by_model,
    caption,
    run_cells,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

# column -> (name in the legend, color); desired and original answers as in bake_logprob
KINDS = {
    "reverse_qa_gen_desired": ("desired", DESIRED),
    "reverse_qa_gen_original": ("original", ORIGINAL),
    "reverse_qa_gen_ambiguous": ("names both", 6),
    "reverse_qa_gen_other": ("other", 5),
}

NEEDS = Needs(
    "bake_answers",
    f"the columns {', '.join(KINDS)} of {TASK} (with free generation, the default)",
    f"lm_eval --model edited_hf --tasks {TASK} --model_args editor=ike --output_path results",
)


def draw(rows: DataFrame) -> Chart:
    """A stacked bar per editor, and one of the unedited model where its run is among the files."""
    forms = by_form(rows, NEEDS, list(KINDS))
    panels = []
    for form in forms:
        for model, group, runs in by_model(form.rows):
            own = group[group["editor"] == UNEDITED].drop_duplicates("run")
            labels = runs | (dict.fromkeys(own["run"], UNEDITED) if len(own) == 1 else {})
            series = [
                _series(name, color, run_cells(group, list(labels), form.column[metric], whiskers=False))
                for metric, (name, color) in KINDS.items()
            ]
            panels.append(
                Bars(
                    title=f"{model}{form.ending}",
                    categories=list(labels.values()),
                    series=series,
                    value_label="share of answers",
                    stacked=True,
                    limits=SHARE,
                )
            )
    notes = [
        "More desired answers are better. An answer that names both the desired and the original subject is a kind of "
        "its own; the paper has no such kind. Without intervals, which would overlap in a stack.",
        *form_notes(forms),
    ]
    sentences = caption(rows_of(forms), whiskers=False, notes=notes)
    return Chart(name=NEEDS.figure, title="Free answers to reverse questions", panels=panels, caption=sentences)


def _series(name: str, color: int, cells: list[Cell]) -> Series:
    """Without whiskers, which would overlap in a stack."""
    return Series(name=name, values=[cell.value for cell in cells], counts=[cell.n for cell in cells], color=color)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="kinds of free answers to reverse questions: desired, original, other",
    published="BAKE (TMLR) figure 5",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows()),
)
