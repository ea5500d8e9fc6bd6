"""Editors with and without an in-context prompt on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.charts import SHARE, Bars, Chart
from lm_edit.figures.select import (
    MISSING,
    caption,
    cell,
    has_context,
    require_edited,
    require_rows,
    series_of,
    unedited_reference,
)
from lm_edit.figures.spec import FigureSpec, Needs

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.figures.select import Cell

# column -> (task, title of its panel)
COLUMNS = {
    "es_prob": ("bake_es", "ES, the edit itself"),
    "gs_prob": ("bake_gs", "GS, paraphrases"),
    "ls_prob": ("bake_ls", "LS, neighborhood"),
    "rqs_prob": ("bake_rq", "RQS, reverse questions"),
    "rjs_prob": ("bake_rj", "RJS, reverse judgments"),
}
BARS = {"without context": False, "with context": True}

NEEDS = Needs(
    "bake_icl",
    "runs of the same editors with and without icl=true, on tasks of bake_qj (any of the columns "
    f"{', '.join(COLUMNS)})",
    "lm_eval --model edited_hf --tasks bake_qj --model_args editor=r_rome,icl=true --output_path results, and the same "
    "without icl=true",
)


def draw(rows: DataFrame) -> Chart:
    """A panel per column, two bars per editor."""
    tasks = [task for task, _ in COLUMNS.values()]
    of_tasks = rows[rows["task"].isin(tasks)]
    present = [metric for metric in COLUMNS if metric in set(of_tasks["metric"])]
    if not present:
        raise NEEDS.missing(f"no run has a column {' or '.join(COLUMNS)}")
    chosen = require_rows(rows, NEEDS, present, tasks=tasks)
    runs = require_edited(chosen, NEEDS)
    contexts = runs.assign(context=runs["icl"].map(has_context))
    # Context editors stand alone: they are contexts already.
    editors = sorted(set(contexts["editor"]))
    both = [name for name in editors if contexts[contexts["editor"] == name]["context"].nunique() == 2]
    if not both:
        raise NEEDS.missing(f"no editor has runs with and without icl=true (editors: {', '.join(editors)})")
    if chosen["model"].nunique() > 1:
        raise NEEDS.missing(f"runs of several models are given; choose with --only model={chosen.iloc[0]['model']}")
    panels = []
    for metric in present:
        of_metric = contexts[contexts["metric"] == metric]
        series = [
            series_of(name, [_one(of_metric, editor, context) for editor in editors], color=color)
            for color, (name, context) in enumerate(BARS.items())
        ]
        panels.append(
            Bars(
                title=COLUMNS[metric][1],
                categories=editors,
                series=series,
                value_label=metric,
                references=unedited_reference(chosen, metric),
                limits=SHARE,
            )
        )
    return Chart(
        name=NEEDS.figure,
        title="Editors with and without an in-context prompt",
        panels=panels,
        caption=caption(chosen, notes=[_alone(editors, both)]),
    )


def _one(rows: DataFrame, editor: str, context: bool) -> Cell:
    chosen = rows[(rows["editor"] == editor) & (rows["context"] == context)]
    return MISSING if chosen.empty else cell(_same_run(chosen, editor))


def _same_run(rows: DataFrame, editor: str) -> DataFrame:
    if len(rows) > 1:
        raise NEEDS.missing(
            f"{len(rows)} runs of {editor} have the same context; choose by --only settings={rows.iloc[0]['settings']}"
        )
    return rows


def _alone(editors: list[str], both: list[str]) -> str:
    alone = [name for name in editors if name not in both]
    return f"Run in one way only: {', '.join(alone)}." if alone else ""


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="editors with and without an in-context prompt on top",
    published="BAKE (TMLR) figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows()),
)
