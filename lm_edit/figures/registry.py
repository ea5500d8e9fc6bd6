"""All figures and tables by name, and drawing one into a file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.figures import bird_weights, case_answers, causal_trace, separation, stream_curves
from lm_edit.figures.bake import bake_answers, bake_icl, bake_logprob, bake_statistics
from lm_edit.figures.drawing.charts import Chart, arranged
from lm_edit.figures.drawing.output import check_output, write_figure
from lm_edit.figures.drawing.style import USUAL, Style
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.evk import evk_align, evk_glue, evk_map
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import DATA, DEFAULTS, Options
from lm_edit.figures.spec import FigureSpec
from lm_edit.figures.thinkedit import (
    knowgic_lengths,
    thinkedit_ckp,
    thinkedit_graph,
    thinkedit_ifr,
    thinkedit_steps,
    thinkedit_tradeoff,
)
from lm_edit.figures.wild import (
    answer_gap,
    qaedit_categories,
    wild_batches,
    wild_gap,
    wild_grid,
    wild_retention,
    wild_table,
)
from lm_edit.results.filters import read_conditions


@functools.cache
def _by_name() -> Mapping[str, FigureSpec]:
    modules = (
        answer_gap, bake_logprob, bake_icl, bake_answers, bake_statistics, bird_weights, wild_gap, wild_table,
        wild_batches, wild_retention, stream_curves, wild_grid, qaedit_categories, evk_glue, evk_align, evk_map,
        thinkedit_ifr, thinkedit_ckp, thinkedit_tradeoff, thinkedit_graph, thinkedit_steps, knowgic_lengths,
        causal_trace, case_answers, separation,
    )  # fmt: skip
    return {module.SPEC.name: module.SPEC for module in modules}


def all_figures() -> list[FigureSpec]:
    """All figures and tables, by paper."""
    return list(_by_name().values())


def find_figure(name: str) -> FigureSpec:
    """A figure by its name; raises EditingError for an unknown one."""
    known = _by_name()
    if name not in known:
        raise EditingError(f"unknown figure {name!r}.{near_misses(name, known)} Accepted: {', '.join(known)}.")
    return known[name]


def draw_figure(
    spec: FigureSpec,
    paths: Sequence[str],
    output: Path,
    only: Sequence[str] = (),
    options: Options = DEFAULTS,
    *,
    style: Style = USUAL,
    order: Sequence[str] = (),
) -> Chart | Table:
    """Draw a figure from files and write it; equal inputs give equal bytes. Return what is drawn.

    Args:
        only: conditions on the results, see :func:`lm_edit.results.filters.filter_rows`.
        order: names that come first, see :func:`~lm_edit.figures.drawing.charts.arranged`.

    Raises:
        EditingError: if the files lack what the figure needs, naming the tasks and settings that write it; for a choice
            that the figure does not have.
    """
    check_output(output, is_table=spec.is_table, style=style)
    if order and spec.is_table:
        raise EditingError(f"--order {','.join(order)}: {spec.name} is a table, which has no such choice.")
    read_conditions(only)  # wrong ones are refused before the files are read
    inputs = Inputs(paths, only)
    spec.refuse_unread(inputs, options)
    if not paths and spec.needs.reads != DATA:
        raise spec.needs.missing("no files are given")
    drawn = spec.draw(inputs, options)
    if order and not isinstance(drawn, Table):
        drawn = arranged(drawn, order)
    write_figure(drawn, output, style)
    return drawn
