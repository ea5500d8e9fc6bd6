"""The files of a figure, read on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edit_hooks.utils.storage.files import user_path
from lm_edit.figures.needs import Needs
from lm_edit.results.comparing import run_labels
from lm_edit.results.filters import MATRIX, SAMPLE_FILE, places_of, rows_at

if TYPE_CHECKING:
    from pandas import DataFrame

    from lm_edit.results.answers.documents import CaseDocument
    from lm_edit.results.tables import ResultSet


@dataclass(frozen=True)
class Inputs:
    """The files of a figure, read on demand.

    Attributes:
        only: conditions on the results, see :func:`lm_edit.results.filters.filter_rows`.
    """

    paths: Sequence[str]
    only: Sequence[str] = ()

    def rows(self) -> DataFrame:
        """The rows of the result files that ``only`` accepts."""
        return self._rows

    @cached_property
    def _read(self) -> ResultSet:
        from lm_edit.results.tables import ResultSet

        return ResultSet.of(self.paths)

    @cached_property
    def _rows(self) -> DataFrame:
        from lm_edit.results.filters import filter_rows
        from lm_edit.results.tables import load_results

        return filter_rows(load_results(self._read), self.only)

    def retention(self) -> DataFrame:
        """The scores of earlier edits after every later step of a stream, of the results that ``only`` accepts."""
        from lm_edit.results.matrices import load_retention

        return rows_at(load_retention(self._read), MATRIX, places_of(self.rows(), MATRIX))

    def steps(self) -> DataFrame:
        """The steps of the streams among the results that ``only`` accepts."""
        from lm_edit.results.matrices import load_steps

        steps = load_steps(self._read)
        return steps[steps["run"].isin(set(self.rows()["run"]))]

    def cases(self) -> DataFrame:
        """The scores of single cases of the results that ``only`` accepts; of runs without samples none."""
        from lm_edit.results.tables import load_cases

        return rows_at(load_cases(self._read, require_samples=False), SAMPLE_FILE, places_of(self.rows(), SAMPLE_FILE))

    def run_names(self) -> dict[str, str]:
        """Run -> label, with the model."""
        return run_labels(self.rows(), always=("model",))

    def documents(self) -> list[CaseDocument]:
        """The cases of the results that ``only`` accepts."""
        from lm_edit.results.answers.documents import load_documents

        return list(load_documents(self._read, places=places_of(self.rows(), SAMPLE_FILE)))

    def file(self, needs: Needs) -> Path:
        """The one file of figures that read a file of another verb."""
        if len(self.paths) != 1:
            raise needs.missing(f"{len(self.paths)} files are given; one is needed")
        path = user_path(self.paths[0], f"file of {needs.figure}")
        if not path.is_file():
            raise needs.missing(f"there is no file {path}")
        return path

    def files(self, needs: Needs) -> list[Path]:
        """The files of figures that read several of another verb; of a folder its JSON files, by name."""
        found: list[Path] = []
        for given in self.paths:
            path = user_path(given, f"file of {needs.figure}")
            inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
            if not inside or not path.exists():
                raise needs.missing(f"there is no file {path}{'/*.json' if path.is_dir() else ''}")
            found += inside
        return found
