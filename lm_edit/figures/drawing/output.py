"""Writing charts and tables to files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.interactive import write_interactive
from lm_edit.figures.drawing.static import write_static
from lm_edit.figures.drawing.tables import Table, write_table

STATIC, INTERACTIVE, TABLES = (".svg", ".png", ".pdf"), (".html",), (".md", ".csv")
INSTALL = 'pip install "lm-eval-editing[report]"'


def check_output(path: Path, *, is_table: bool = False, dark: bool = False) -> None:
    """Raise EditingError if no chart, or no table, can be written to this path: another name or a library is needed."""
    if dark and path.suffix not in STATIC:
        raise EditingError(f"a dark ground is for {', '.join(STATIC)}; {path.name} has none.")
    accepted = TABLES if is_table else STATIC + INTERACTIVE
    if path.suffix not in accepted:
        what = "table" if is_table else "figure"
        raise EditingError(f"no {what} can be written to {str(path)!r}; use a name that ends in {', '.join(accepted)}.")
    library = "plotly" if path.suffix in INTERACTIVE else "matplotlib" if path.suffix in STATIC else None
    if library and importlib.util.find_spec(library) is None:
        raise EditingError(f"{path.suffix} files need {library}: {INSTALL}.")


def write_figure(drawn: Chart | Table, path: Path, *, dark: bool = False) -> Path:
    """Write a chart or a table in the format of the path's suffix; equal inputs give equal bytes.

    Args:
        dark: light ink on a dark ground, of charts that matplotlib draws.
    """
    check_output(path, is_table=isinstance(drawn, Table), dark=dark)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(drawn, Table):
        return write_table(drawn, path)
    return write_interactive(drawn, path) if path.suffix in INTERACTIVE else write_static(drawn, path, dark=dark)
