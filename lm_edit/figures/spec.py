"""Figures: their descriptions and inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.files import user_path
from lm_edit.figures.charts import Chart
from lm_edit.figures.tables import Table

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results import CaseDocument

RESULTS, SAMPLES, FILE, DATA = "results", "samples", "file", "data"
SAMPLE_FILE = ("file", "task")  # columns that name the samples of a result
MATRIX = (*SAMPLE_FILE, "metric", "filter")  # columns that name the matrix of a result


class Needs(NamedTuple):
    """Inputs of a figure.

    Attributes:
        figure: name of the figure.
        columns: tasks, columns and settings, in words.
        command: a command that writes such files; it runs as it is, on the demo model and the embedded samples.
        reads: ``results`` (result files), ``samples`` (result files with their samples), ``file`` (one file of another
            verb) or ``data`` (records of a benchmark, named by ``--data``).
        further: further runs that the figure needs or can show, in words.
    """

    figure: str
    columns: str
    command: str
    reads: str = RESULTS
    further: str = ""

    @property
    def example(self) -> str:
        """The command, and further runs."""
        return f"{self.command}, {self.further}" if self.further else self.command

    def missing(self, what: str) -> EditingError:
        """The error for files that lack these inputs."""
        return EditingError(f"{self.figure}: {what}. It needs {self.columns}; for example: {self.example}")


class Options(NamedTuple):
    """Choices of the user.

    Attributes:
        metric: column to draw in place of the default.
        case: case id, for figures of one case.
        data: origin of records, for tables of a data set; ``None``: not chosen.
    """

    metric: str | None = None
    case: str | None = None
    data: str | None = None

    @property
    def origin(self) -> str:
        """``data``, by default the embedded records."""
        return self.data or "mini"


DEFAULTS = Options()


@dataclass(frozen=True)
class Inputs:
    """The files of a figure, read on demand.

    Attributes:
        only: column of the results -> accepted values as texts, see :func:`keep_only`.
    """

    paths: Sequence[str]
    only: Mapping[str, Sequence[str]]

    def rows(self) -> DataFrame:
        """The rows of the result files that ``only`` accepts."""
        return self._rows

    @cached_property
    def _rows(self) -> DataFrame:
        from lm_edit.results import load_results

        return keep_only(load_results(self.paths), self.only)

    def retention(self) -> DataFrame:
        """The scores of earlier edits after every later step of a stream, of the results that ``only`` accepts."""
        from lm_edit.results import load_retention

        return rows_at(load_retention(self.paths), MATRIX, places_of(self.rows(), MATRIX))

    def run_names(self) -> dict[str, str]:
        """Run -> editor, the settings in which the model's runs differ, and the model. No two names are equal."""
        from lm_edit.figures.select import run_labels

        names: dict[str, str] = {}
        for model, group in self.rows().groupby("model"):
            unedited = dict(zip(group["run"], group["editor"], strict=True))
            labels = unedited | run_labels(group)
            names |= {run: f"{label}, {model}" for run, label in labels.items()}
        repeated = {run for run, name in names.items() if list(names.values()).count(name) > 1}
        return {run: f"{name} [{run[:6]}]" if run in repeated else name for run, name in names.items()}

    def documents(self) -> list[CaseDocument]:
        """The cases of the results that ``only`` accepts."""
        from lm_edit.results import load_documents

        return list(load_documents(self.paths, places=places_of(self.rows(), SAMPLE_FILE)))

    def file(self, needs: Needs) -> Path:
        """The one file of figures that read a file of another verb."""
        if len(self.paths) != 1:
            raise needs.missing(f"{len(self.paths)} files are given; one is needed")
        path = user_path(self.paths[0], f"file of {needs.figure}")
        if not path.is_file():
            raise needs.missing(f"there is no file {path}")
        return path


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
            raise EditingError(f"--only {next(iter(inputs.only))}: {self.name} reads no results of runs. Leave it out.")
        for name in ("metric", "case"):
            value = getattr(options, name)
            if value is not None and name not in self.options:
                raise EditingError(
                    f"--{name} {value}: the figure {self.name} has no such choice. Leave it out; lm-edit figures "
                    f"{self.name} prints what is drawn."
                )


def places_of(rows: DataFrame, columns: Sequence[str]) -> set[tuple[str, ...]]:
    """The values of the rows in some columns."""
    return set(zip(*(rows[column] for column in columns), strict=True))


def rows_at(rows: DataFrame, columns: Sequence[str], places: Collection[tuple[str, ...]]) -> DataFrame:
    """The rows that have one of the places in these columns."""
    from pandas import Series

    found = [place in places for place in zip(*(rows[column] for column in columns), strict=True)]
    return rows[Series(found, index=rows.index, dtype=bool)]


def keep_only(rows: DataFrame, only: Mapping[str, Sequence[str]]) -> DataFrame:
    """The rows with the given values.

    Args:
        only: column -> texts, of which each is a value of the column or, where no row has it, several between commas.

    Raises:
        EditingError: for unknown columns and where no row is left.
    """
    for column, values in only.items():
        if column not in rows.columns:
            raise EditingError(f"--only {column}: no such column.{near_misses(column, rows.columns)}")
        present = rows[column].map(_as_text)
        known = set(present)
        accepted = {value for text in values for value in ([text] if text in known else text.split(","))}
        kept = rows[present.isin(accepted)]
        if kept.empty:
            found = ", ".join(sorted(set(present))[:12])
            raise EditingError(f"--only {column}={','.join(values)}: no row has such a value; there are {found}.")
        rows = kept
    return rows


def _as_text(value: object) -> str:
    """A value as it is written in ``--only``; whole numbers without a point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
