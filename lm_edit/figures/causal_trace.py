"""Heat maps of a causal trace, layers by token groups: one for states, one for MLPs, one for attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edit_hooks.locate.causal_trace import GROUPS, KINDS, Trace
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import replacing

SUFFIXES = (".svg", ".png", ".pdf")
INSTALL_COMMAND = 'pip install "lm-eval-editing[report]"'
TITLES = {"state": "block output", "mlp": "MLP, window of {window}", "attention": "attention, window of {window}"}


def check_plot(path: str | Path) -> None:
    """Raise EditingError if no plot can be written to this path."""
    if Path(path).suffix not in SUFFIXES:
        raise EditingError(f"no plot can be written to {str(path)!r}; use a name that ends in {', '.join(SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise EditingError(f"--plot needs matplotlib: {INSTALL_COMMAND}. The table and --out work without it.")


def plot_trace(trace: Trace, path: str | Path, title: str = "") -> Path:
    """Write the figure; the color scale of each panel runs from zero (white) to its largest effect."""
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
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:  # its name does not show the format
        file_format = target.suffix[1:]
        figure.savefig(temporary, format=file_format, metadata={"Date": None} if file_format == "svg" else None)
    return target
