"""Editors with and without EVK-Align."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_edit.figures.charts import Chart
from lm_edit.figures.paired import Comparison, draw_pairs
from lm_edit.figures.spec import FigureSpec, Needs

if TYPE_CHECKING:
    from pandas import DataFrame

SETTING = "evk_align"
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


def is_aligned(rows: DataFrame) -> list[bool]:
    """For each row: EVK-Align is on in the editor's settings."""
    return [isinstance(config, Mapping) and config.get(SETTING) is True for config in rows["editor_config"]]


FIGURE = Comparison(
    needs=NEEDS,
    title="Gains by EVK-Align",
    columns=COLUMNS,
    setting=SETTING,
    is_added=is_aligned,
    with_name="EVK-Align",
    without_name="baseline",
    only_pairs=True,
)


def draw(rows: DataFrame) -> Chart:
    """A panel per column, two bars per editor that has both kinds of runs."""
    return draw_pairs(rows, FIGURE)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="editors with and without EVK-Align",
    published="EVK figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows()),
)
