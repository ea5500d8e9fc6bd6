"""Writing charts and tables to files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.interactive import write_interactive
from lm_edit.figures.drawing.static import write_static
from lm_edit.figures.drawing.style import USUAL, Style, check_font, drawn_in
from lm_edit.figures.drawing.tables import Table, write_table

STATIC, INTERACTIVE, TABLES = (".svg", ".png", ".pdf"), (".html",), (".md", ".csv")
INSTALL = 'pip install "lm-eval-editing[report]"'


def check_output(path: Path, *, is_table: bool = False, style: Style = USUAL) -> None:
    """Raise EditingError if no chart, or no table, can be written to this path.

    Another name or a library is needed, or a style that this format has.
    """
    if path.suffix not in STATIC and (option := style.needing_matplotlib()):
        raise EditingError(f"{option} is for {', '.join(STATIC)}; {path.name} is drawn without it.")
    if path.suffix in TABLES and style.palette:
        raise EditingError(f"--palette is for figures; {path.name} is a table.")
    accepted = TABLES if is_table else STATIC + INTERACTIVE
    if path.suffix not in accepted:
        what = "table" if is_table else "figure"
        raise EditingError(f"no {what} can be written to {str(path)!r}; use a name that ends in {', '.join(accepted)}.")
    library = "plotly" if path.suffix in INTERACTIVE else "matplotlib" if path.suffix in STATIC else None
    if library and importlib.util.find_spec(library) is None:
        raise EditingError(f"{path.suffix} files need {library}: {INSTALL}.")
    if style.font:
        check_font(style.font)


def write_figure(drawn: Chart | Table, path: Path, style: Style = USUAL) -> Path:
    """Write a chart or a table in the format of the path's suffix; equal inputs give equal bytes."""
    check_output(path, is_table=isinstance(drawn, Table), style=style)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(drawn, Table):
        return write_table(drawn, path)
    with drawn_in(style):
        return write_interactive(drawn, path) if path.suffix in INTERACTIVE else write_static(drawn, path)
