"""Export to a data set of the Hugging Face hub: a folder that ``datasets.load_dataset`` reads."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from edit_hooks.utils.storage.files import replacing, write_atomically
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.results.exports.csv_table import chosen_tables
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.schema import CASE_COLUMNS, MAPPING, RESULT_COLUMNS, VALUE
from lm_edit.results.tables import Source

CARD = """---
configs:
{configs}
---

Results of knowledge editing, written by `lm-edit results export --to dataset`: a row of `results` is a metric of a task
in a run, a row of `cases` the score of one case. Mappings and lists are JSON texts.

{columns}
"""


def export_dataset(paths: Source, out: Path, options: ExportOptions) -> ExportResult:
    """Write ``results.parquet``, ``cases.parquet`` if there are samples, and a card that names their columns."""
    exported, tables = chosen_tables(paths, options, "cases.parquet")
    out.mkdir(parents=True, exist_ok=True)
    configs, columns = [], []
    for name, frame, described in (
        ("results", tables[0], RESULT_COLUMNS),
        ("cases", tables[1], CASE_COLUMNS),
    ):
        if frame.empty:
            continue
        path = out / f"{name}.parquet"
        with replacing(path) as temporary:
            _plain(frame, described).to_parquet(temporary, index=False)
        exported.files.append(path)
        configs.append(f"- config_name: {name}\n  data_files: {path.name}")
        rows = [f"| `{column}` | {words} |" for column, (_, words) in described.items()]
        columns.append("\n".join([f"## {name}", "", "| column | content |", "|---|---|", *rows, ""]))
    write_atomically(out / "README.md", CARD.format(configs="\n".join(configs), columns="\n".join(columns).rstrip()))
    exported.files.append(out / "README.md")
    return exported


def _plain(frame: pd.DataFrame, described: dict[str, tuple[str, str]]) -> pd.DataFrame:
    """The table with one type per column: values of several types are JSON texts, missing ones the empty text."""
    texts = [name for name, (kind, _) in described.items() if kind in (MAPPING, VALUE)]
    return frame.assign(**{name: [_text(value) for value in frame[name]] for name in texts})


def _text(value: object) -> str:
    return "" if value is None or value != value else json_text(value)
