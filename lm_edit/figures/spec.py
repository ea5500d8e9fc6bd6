"""`FigureSpec`: a figure or table of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import DATA, FILE, Needs, Options


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """A figure or table of this package.

    Attributes:
        title: its content, for lists.
        published: the figure or table of a paper that it follows.
        draw: reads the inputs and returns the chart or table; raises EditingError if something is missing.
        options: the names of :class:`Options` beside ``data`` that ``draw`` reads.
        is_table: ``draw`` returns a table.
    """

    name: str
    title: str
    published: str
    needs: Needs
    draw: Callable[[Inputs, Options], Chart | Table]
    options: tuple[str, ...] = ()
    is_table: bool = False

    def refuse_unread(self, inputs: Inputs, options: Options) -> None:
        """Raise EditingError for files and choices of the user that this figure does not read."""
        reads = self.needs.reads
        if reads == DATA and inputs.paths:
            raise EditingError(
                f"{inputs.paths[0]}: {self.name} is about a data set and reads no result files; choose it with --data."
            )
        if reads != DATA and options.data is not None:
            raise EditingError(
                f"--data {options.data}: {self.name} reads the files that are given; --only data={options.data} "
                "chooses runs on these data."
            )
        if reads in (DATA, FILE) and inputs.only:
            raise EditingError(f"--only {inputs.only[0]}: {self.name} reads no results of runs. Leave it out.")
        for name in ("metric", "case"):
            value = getattr(options, name)
            if value is not None and name not in self.options:
                raise EditingError(
                    f"--{name} {value}: the figure {self.name} has no such choice. Leave it out; lm-edit figures "
                    f"{self.name} prints what is drawn."
                )
