"""The inputs that a figure needs, and the choices of its user."""

from __future__ import annotations

from typing import NamedTuple

from edit_hooks.utils.errors import EditingError

RESULTS, SAMPLES, FILE, DATA = "results", "samples", "file", "data"


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
