"""A picture of a causal trace: for states, MLP and attention a heat map of layers by token positions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edit_hooks.locate.causal_trace import GROUPS, KINDS, Trace
from edit_hooks.utils.errors import EditingError

SUFFIXES = (".svg", ".png", ".pdf")


INSTALL_COMMAND = 'pip install "lm-eval-editing[report]"'


TITLES = {"state": "block output", "mlp": "MLP, window of {window}", "attention": "attention, window of {window}"}


def check_plot(path: str | Path) -> None:
    """Raise EditingError when no plot can be written under this name, before anything is computed."""
    if Path(path).suffix not in SUFFIXES:
        raise EditingError(f"plots are written as {', '.join(SUFFIXES)}; {str(path)!r} ends in none of them.")
    if importlib.util.find_spec("matplotlib") is None:
        raise EditingError(f"a plot needs matplotlib, which is missing: {INSTALL_COMMAND}. Table and JSON do not.")


def plot_trace(trace: Trace, path: str | Path, title: str = "") -> Path:
    """Write the picture; each panel has its own colors from zero (white) to its largest effect."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(KINDS), 2.8), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    figure.suptitle(title or f"average indirect effect over {trace.num_facts} facts")
    for number, kind in enumerate(KINDS):
        groups = [group for group in GROUPS if group in trace.effects[kind]]
        values = [trace.effects[kind][group]["mean"] for group in groups]
        axes = figure.add_subplot(1, len(KINDS), number + 1)
        top = max(1e-12, max(map(max, values)))
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="Purples", vmin=0.0, vmax=top)
        axes.set_title(TITLES[kind].format(window=trace.settings["window"]))
        axes.set_xlabel("layer")
        axes.set_yticks(range(len(groups)), [group.replace("_", " ") for group in groups])
        figure.colorbar(image, ax=axes)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
    return Path(path)
