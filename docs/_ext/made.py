"""Pictures of the gallery and the example leaderboard page, made from kept results as `lm-edit` makes them.

``docs/_data/gallery`` has the runs of ``docs/_data/gallery.yaml`` as a results repository (``lm-edit results submit``),
and the files of figures that read no results. The files made from them are in ``docs/_made``, which git ignores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import yaml
from block import ROOT
from blocks_field import long_stream_curves
from blocks_measured import ablation_front

from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import DATA, Options
from lm_edit.figures.registry import draw_figure, find_figure
from lm_edit.leaderboard.site import make_site

if TYPE_CHECKING:
    from sphinx.application import Sphinx

    from lm_edit.figures.drawing.charts import Chart
    from lm_edit.figures.drawing.tables import Table

KEPT = ROOT / "docs/_data/gallery"
MADE = ROOT / "docs/_made"
RESULTS = "results"  # of KEPT, its folder of runs


class Example(NamedTuple):
    """An example of a figure.

    Attributes:
        runs: the runs behind it, in words.
        file: the file or folder of :data:`KEPT` that it reads, if the figure reads any.
        only: conditions on the results, as after ``--only``.
        case: the case of a figure of one case.
        picture: a picture in ``docs/_static/figures`` that is kept, since the README shows it.
    """

    runs: str
    file: str = RESULTS
    only: tuple[str, ...] = ()
    case: str | None = None
    picture: str | None = None


@functools.cache
def examples() -> dict[str, Example]:
    """Figure -> its example in the gallery."""
    content = yaml.safe_load((ROOT / "docs/_data/gallery_figures.yaml").read_text(encoding="utf-8"))
    return {name: Example(**{**entry, "only": tuple(entry.get("only", ()))}) for name, entry in content.items()}


def paths_of(name: str) -> list[str]:
    """The kept files that a figure reads."""
    return [] if find_figure(name).needs.reads == DATA else [str(KEPT / examples()[name].file)]


@functools.cache
def _inputs(paths: tuple[str, ...], only: tuple[str, ...]) -> Inputs:
    """Inputs that several figures share, so that results are read once."""
    return Inputs(paths, only)


def example(name: str) -> Chart | Table:
    """The example of a figure as data, without a picture."""
    chosen = examples()[name]
    return find_figure(name).draw(_inputs(tuple(paths_of(name)), chosen.only), Options(case=chosen.case))


def make() -> None:
    """Draw the pictures and make the leaderboard page."""
    for name, chosen in examples().items():
        if not find_figure(name).is_table and chosen.picture is None:
            target = MADE / "figures" / f"{name}.svg"
            draw_figure(find_figure(name), paths_of(name), target, chosen.only, Options(case=chosen.case))
    for chart in (ablation_front(), long_stream_curves()):
        write_figure(chart, MADE / f"figures/{chart.name}.svg")
    page = MADE / "pages/leaderboard/index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(make_site([str(KEPT / RESULTS)], published="none").files[page.name], encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the files before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: make(), priority=400)
    return {"parallel_read_safe": True}
