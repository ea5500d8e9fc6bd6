"""Editors with and without an in-context prompt on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.needs import DEFAULTS, Needs, Options
from lm_edit.figures.paired import PairedFigure, draw_pairs
from lm_edit.figures.spec import FigureSpec
from lm_edit.results.comparing import has_context

if TYPE_CHECKING:
    from pandas import DataFrame

# column -> (tasks, title of its panel)
COLUMNS = {
    "efficacy_prob": (("bake_es",), "ES, the edit itself"),
    "paraphrase_prob": (("bake_gs",), "GS, paraphrases"),
    "neighborhood_prob": (("bake_ls",), "LS, neighborhood"),
    "reverse_qa_prob": (("bake_rq",), "RQS, reverse questions"),
    "reverse_judgment_prob": (("bake_rj",), "RJS, reverse judgments"),
}

NEEDS = Needs(
    "bake_icl",
    "runs of the same editors with and without icl=true, on tasks of bake_qj (any of the columns "
    f"{', '.join(COLUMNS)}, or another one of their tasks by --metric)",
    "lm_eval --model edited_hf --tasks bake_qj --model_args editor=r_rome,icl=true --output_path results",
    further="and the same without icl=true",
)


FIGURE = PairedFigure(
    needs=NEEDS,
    title="Editors with and without an in-context prompt",
    columns=COLUMNS,
    setting="icl=true",
    is_added=lambda rows: [has_context(icl) for icl in rows["icl"]],
    with_name="with context",
    without_name="without context",
    only_pairs=False,  # context editors have no pair: they are contexts already
)


def draw(rows: DataFrame, options: Options = DEFAULTS) -> Chart:
    """A panel per column, two bars per editor."""
    return draw_pairs(rows, FIGURE, options)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="editors with and without an in-context prompt on top",
    published="BAKE (TMLR) figure 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(inputs.rows(), options),
    options=("metric",),
)
