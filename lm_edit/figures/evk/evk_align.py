"""Editors with and without EVK-Align."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.paired import PairedFigure, draw_pairs
from lm_edit.figures.spec import FigureSpec
from lm_eval_tasks.report.editor_settings import find_setting

if TYPE_CHECKING:
    from pandas import DataFrame

SETTING = "evk_align"
# column -> (tasks, title)
COLUMNS = {
    "efficacy_prob": (("counterfact_es",), "CounterFact, efficacy"),
    "paraphrase_prob": (("counterfact_gs",), "CounterFact, generalization"),
    "neighborhood_prob": (("counterfact_ls",), "CounterFact, specificity"),
    # The columns of EVK's table 1. Equations 15 and 16 of the paper define `_argmax`; docs/_data/published_tables.yaml.
    "efficacy_token_acc": (("zsre_memit_efficacy",), "ZsRE, efficacy"),
    "paraphrase_token_acc": (("zsre_memit_paraphrase",), "ZsRE, generalization"),
    "neighborhood_token_acc": (("zsre_memit_specificity",), "ZsRE, specificity"),
    "evk_es": (("counterfact_evk_es",), "EVK-Bench, embedding stability"),
    "evk_ts": (("counterfact_evk_ts",), "EVK-Bench, text stability"),
}

NEEDS = Needs(
    "evk_align",
    f"runs of the same editors with and without editor_args={SETTING}:true (of rect and prune: in base_settings) on "
    f"tasks of evk_table1 (any of the columns {', '.join(COLUMNS)}, or another one of their tasks by --metric)",
    "lm_eval --model edited_hf --tasks evk_table1_counterfact --model_args 'editor=r_rome,editor_args=evk_align:true' "
    "--output_path results",
    further="and the same without editor_args; or lm-edit sweep evk_figure4",
)


def is_aligned(rows: DataFrame) -> list[bool]:
    """For each row: EVK-Align is on in the editor's settings, or in those of the editor that it post-processes."""
    return [find_setting(config, SETTING) is True for config in rows["editor_config"]]


FIGURE = PairedFigure(
    needs=NEEDS,
    title="Gains by EVK-Align",
    columns=COLUMNS,
    setting=SETTING,
    is_added=is_aligned,
    with_name="EVK-Align",
    without_name="baseline",
    only_pairs=True,
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per column, two bars per editor that has both kinds of runs."""
    return draw_pairs(rows, FIGURE, options)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="editors with and without EVK-Align",
    published="EVK figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
