"""Editors with and without EVK-Align."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_edit.figures.charts import SHARE, Bars, Chart
from lm_edit.figures.select import (
    MISSING,
    Cell,
    caption,
    cell,
    require_edited,
    require_rows,
    series_of,
    unedited_reference,
)
from lm_edit.figures.spec import FigureSpec, Needs

if TYPE_CHECKING:
    from pandas import DataFrame

SETTING = "evk_align"
ALIGNED = " + EVK-Align"
# column -> (tasks, title)
COLUMNS = {
    "es_prob": (("counterfact_es",), "CounterFact, efficacy"),
    "gs_prob": (("counterfact_gs",), "CounterFact, generalization"),
    "ls_prob": (("counterfact_ls",), "CounterFact, specificity"),
    "efficacy_match": (("zsre_memit_efficacy",), "ZsRE, efficacy"),
    "paraphrase_match": (("zsre_memit_paraphrase",), "ZsRE, generalization"),
    "specificity_match": (("zsre_memit_specificity",), "ZsRE, specificity"),
    "evk_es": (("counterfact_evk_es",), "EVK-Bench, embedding stability"),
    "evk_ts": (("counterfact_evk_ts",), "EVK-Bench, text stability"),
}

NEEDS = Needs(
    "evk_align",
    f"runs of the same editors with and without editor_args={SETTING}:true, on tasks of evk_table1 (any of the columns "
    f"{', '.join(COLUMNS)})",
    "lm_eval --model edited_hf --tasks evk_table1_counterfact --model_args 'editor=r_rome,editor_args=evk_align:true' "
    "--output_path results, and the same without editor_args",
)


def with_align(rows: DataFrame) -> DataFrame:
    """The rows with a column ``aligned``: EVK-Align is on in the editor's settings."""
    return rows.assign(
        aligned=rows["editor_config"].map(lambda config: isinstance(config, Mapping) and config.get(SETTING) is True)
    )


def draw(rows: DataFrame) -> Chart:
    """A panel per column, two bars per editor that has both kinds of runs."""
    tasks = [task for names, _ in COLUMNS.values() for task in names]
    of_tasks = rows[rows["task"].isin(tasks)]
    present = [metric for metric in COLUMNS if metric in set(of_tasks["metric"])]
    if not present:
        raise NEEDS.missing(f"no run has a column {' or '.join(COLUMNS)}")
    chosen = require_rows(of_tasks, NEEDS, present)
    runs = with_align(require_edited(chosen, NEEDS))
    if chosen["model"].nunique() > 1:
        raise NEEDS.missing(f"runs of several models are given; choose with --only model={chosen.iloc[0]['model']}")
    both = [str(editor) for editor, group in runs.groupby("editor") if group["aligned"].nunique() == 2]
    if not both:
        raise NEEDS.missing(
            f"no editor has runs with and without {SETTING} (editors: {', '.join(sorted(set(runs['editor'])))})"
        )
    panels = []
    for metric in present:
        of_metric = runs[runs["metric"] == metric]
        series = [
            series_of("baseline", [_one(of_metric, editor, False) for editor in both], color=0),
            series_of(ALIGNED.removeprefix(" + "), [_one(of_metric, editor, True) for editor in both], color=4),
        ]
        panels.append(
            Bars(
                title=COLUMNS[metric][1],
                categories=both,
                series=series,
                value_label=metric,
                references=unedited_reference(chosen, metric),
                limits=SHARE,
            )
        )
    return Chart(name=NEEDS.figure, title="Gains by EVK-Align", panels=panels, caption=caption(chosen))


def _one(rows: DataFrame, editor: str, aligned: bool) -> Cell:
    own = rows[(rows["editor"] == editor) & (rows["aligned"] == aligned)]
    if len(own) > 1:
        raise NEEDS.missing(
            f"{len(own)} runs of {editor} have {SETTING}={str(aligned).lower()}; choose with --only "
            f"settings={own.iloc[0]['settings']} or --only mode={own.iloc[0]['mode']}"
        )
    return MISSING if own.empty else cell(own)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="editors with and without EVK-Align",
    published="EVK figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows()),
)
