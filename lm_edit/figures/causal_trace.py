"""Heat maps of a causal trace, layers by token groups: one for states, one for MLPs, one for attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.storage.json_io import read_json
from lm_edit.figures.drawing.charts import Chart, HeatMap
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import FILE, Needs, Options
from lm_edit.figures.spec import FigureSpec

if TYPE_CHECKING:
    from edit_hooks.locate.tracing.causal_trace import Trace

TITLES = {"state": "block output", "mlp": "MLP, window of {window}", "attention": "attention, window of {window}"}

NEEDS = Needs(
    "causal_trace",
    "one file written by lm-edit trace --out",
    "lm-edit trace --edits counterfact --out trace.json",
    FILE,
)


def draw(trace: Mapping[str, Any], title: str = "") -> Chart:
    """A heat map per kind of restored states; each color scale runs from zero (white) to the panel's largest effect.

    Args:
        trace: the fields of :class:`~edit_hooks.locate.tracing.causal_trace.Trace`.
    """
    try:
        panels = [
            _panel(groups, TITLES[kind].format(window=trace["settings"]["window"]))
            for kind, groups in trace["effects"].items()
        ]
        caption = [
            f"Mean indirect effect over n = {trace['num_facts']} facts ({len(trace['skipped'])} skipped): rise of "
            f"the answer's probability, {trace['corrupted']:.3f} with a noisy subject, {trace['clean']:.3f} without."
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NEEDS.missing(f"the file is no causal trace ({type(error).__name__}: {error})") from None
    return Chart(name=NEEDS.figure, title=title or "Causal trace", panels=panels, caption=caption, columns=3)


def _panel(groups: Mapping[str, Mapping[str, Any]], title: str) -> HeatMap:
    values = [[float(value) for value in group["mean"]] for group in groups.values()]
    return HeatMap(
        title=title,
        rows=[name.replace("_", " ") for name in groups],
        columns=[str(layer) for layer in range(len(values[0]))],
        values=values,
        row_label="restored tokens",
        column_label="layer",
        value_label="indirect effect (probability)",
        limits=(0.0, max(1e-12, *(value for row in values for value in row))),
        annotated=False,
    )


def plot_trace(trace: Trace, path: str | Path, title: str = "") -> Path:
    """Write the figure of a trace that was just computed."""
    return write_figure(draw(trace.to_dict(), title), Path(path))


def _from_file(inputs: Inputs, options: Options) -> Chart:
    content = read_json(inputs.file(NEEDS), "causal trace")
    if not isinstance(content, Mapping):
        raise NEEDS.missing("the file is no causal trace")
    return draw(content, f"Causal trace of {content.get('model', 'a model')}")


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="causal trace: layers and tokens that mediate a set of facts",
    published="ROME figure 2",
    needs=NEEDS,
    draw=_from_file,
)
