"""Export to CSV: the tables of results and cases."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.filters import SAMPLE_FILE, filter_rows, places_of, rows_at
from lm_edit.results.tables import Source, load_cases, load_results

OF_CASES = (*SAMPLE_FILE, "metric", "stage", "filter")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export_csv(paths: Source, out: Path, options: ExportOptions) -> ExportResult:
    """Write ``results.csv``, and ``cases.csv`` if there are samples.

    Mappings and lists are JSON texts. A text that spreadsheet programs would run as a formula is preceded by ``'``.
    """
    exported, tables = chosen_tables(paths, options, "cases.csv")
    out.mkdir(parents=True, exist_ok=True)
    for name, frame in zip(("results.csv", "cases.csv"), tables, strict=True):
        if not frame.empty:
            write_atomically(out / name, _csv(frame))
            exported.files.append(out / name)
    return exported


def chosen_tables(
    paths: Source, options: ExportOptions, of_cases: str
) -> tuple[ExportResult, tuple[pd.DataFrame, pd.DataFrame]]:
    """The tables of results and cases that the options choose, and what the second one lacks.

    Args:
        of_cases: name of the file of cases, for the reason.
    """
    results, cases = filter_rows(load_results(paths), options.only), load_cases(paths, require_samples=False)
    if options.only:
        cases = rows_at(cases, OF_CASES, places_of(results, OF_CASES))
    exported = ExportResult()
    places = places_of(results, SAMPLE_FILE)
    for _ in [one for one in cases.attrs["without_samples"] if (one["file"], one["task"]) in places]:
        exported.leave_out(f"no samples beside the result file: no rows in {of_cases}")
    return exported, (results, cases)


def _csv(frame: pd.DataFrame) -> str:
    buffer = io.StringIO()
    frame.map(_cell).to_csv(buffer, index=False, lineterminator="\n")
    return buffer.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, (dict, list, tuple)):
        return json_text(value) if value else ""
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value
