"""Log-probabilities of the desired and the original answer to reverse questions, by editor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.bake.reverse_questions import TASK, by_form, form_notes, rows_of
from lm_edit.figures.drawing.charts import Bars, Chart, Reference
from lm_edit.figures.needs import Needs
from lm_edit.figures.select import (
    by_model,
    caption,
    distinct_values,
    edited,
    run_cells,
    series_of,
    unedited_reference,
)
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from pandas import DataFrame

# column -> its name in the legend
ANSWERS = {"reverse_qa_logprob_new": "desired answer", "reverse_qa_logprob_true": "original answer"}
DESIRED, ORIGINAL = 1, 2  # colors: orange and green, as published
COLORS = {"reverse_qa_logprob_new": DESIRED, "reverse_qa_logprob_true": ORIGINAL}

NEEDS = Needs(
    "bake_logprob",
    f"the columns {', '.join(ANSWERS)} of {TASK}, for any editors",
    f"lm_eval --model edited_hf --tasks {TASK} --model_args editor=r_rome --output_path results",
)


def draw(rows: DataFrame) -> Chart:
    """Two bars per editor; lines are the unedited model's values, by its own run or measured beside the edited one."""
    forms = by_form(rows, NEEDS, list(ANSWERS))
    chosen = rows_of(forms)
    panels, notes = [], []
    for form in forms:
        for model, group, labels in by_model(form.rows):
            companions = form.all_rows[form.all_rows["model"] == model]
            references: list[Reference] = []
            for metric, name in ANSWERS.items():
                lines, differing = _before(companions, form.column[metric], name, COLORS[metric])
                references += lines
                notes += [f"{model}: {differing}" if chosen["model"].nunique() > 1 else differing] if differing else []
            panels.append(
                Bars(
                    title=f"{model}{form.ending}",
                    categories=list(labels.values()),
                    series=[
                        series_of(name, run_cells(group, list(labels), form.column[metric]), color=COLORS[metric])
                        for metric, name in ANSWERS.items()
                    ],
                    value_label="log-probability per token, nats",
                    references=references,
                )
            )
    title = "Reverse questions: log-probability of the desired and the original answer"
    note = "Closer to 0 is more probable; better is a desired answer more probable than the original one."
    dashed = ["Dashed: the unedited model."] if any(panel.references for panel in panels) else []
    sentences = caption(chosen, unedited=False, notes=[note, *form_notes(forms), *dashed, *notes])
    return Chart(name=NEEDS.figure, title=title, panels=panels, caption=sentences)


def _before(rows: DataFrame, metric: str, answer: str, color: int) -> tuple[list[Reference], str]:
    """The unedited model's value, and a sentence where the files have several.

    It is that of its own run, else the column ``_unedited`` of edited runs where they agree.
    """
    name = f"{answer}, unedited"
    own = unedited_reference(rows, metric, name, color)
    if own:
        return own, ""
    beside = distinct_values(edited(rows)[edited(rows)["metric"] == f"{metric}_unedited"])
    if len(beside) > 1:
        return [], (
            f"No line of the unedited model ({answer}): beside the edits it has {beside[0]:.4g} to "
            f"{beside[-1]:.4g}, since the runs differ in cases or in how they ask."
        )
    return [Reference(name=name, value=value, color=color) for value in beside], ""


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="log-probability of desired and original answers to reverse questions, by editor",
    published="BAKE (TMLR) figures 3, 6, 7 and 8; BIRD figures 3, 5, 6 and 7",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows()),
)
