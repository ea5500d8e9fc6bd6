"""Export to CSV: the tables of results and cases."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from edit_hooks.utils.files import write_atomically
from edit_hooks.utils.json_io import json_text
from lm_edit.results.exports.options import Exported, ExportOptions
from lm_edit.results.runs import Paths
from lm_edit.results.tables import load_cases, load_results

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export_csv(paths: Paths, out: Path, options: ExportOptions) -> Exported:
    """Write ``results.csv``, and ``cases.csv`` if there are samples.

    Mappings and lists are JSON texts. A text that spreadsheet programs would run as a formula is preceded by ``'``.
    """
    results, cases = load_results(paths), load_cases(paths, require_samples=False)
    exported = Exported()
    out.mkdir(parents=True, exist_ok=True)
    for name, frame in (("results.csv", results), ("cases.csv", cases)):
        if not frame.empty:
            write_atomically(out / name, _csv(frame))
            exported.files.append(out / name)
    for _ in cases.attrs["without_samples"]:
        exported.leave_out("no samples beside the result file: no rows in cases.csv")
    return exported


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
