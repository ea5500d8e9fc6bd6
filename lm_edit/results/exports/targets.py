"""The table of export targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.outputs import check_output_folder
from lm_edit.results.exports.csv_table import export_csv
from lm_edit.results.exports.dataset import export_dataset
from lm_edit.results.exports.every_eval_ever import export_every_eval_ever
from lm_edit.results.exports.hugging_face import export_hugging_face
from lm_edit.results.exports.inspect_log import export_inspect
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.files.runs import Paths
from lm_edit.results.tables import ResultSet, Source


class Target(NamedTuple):
    """A format.

    Attributes:
        summary: one line.
        write: (result files and folders, new folder, options) -> what was written.
    """

    summary: str
    write: Callable[[Source, Path, ExportOptions], ExportResult]


TARGETS: Mapping[str, Target] = {
    "csv": Target("results.csv and, with samples, cases.csv: the tables that the documents describe", export_csv),
    "dataset": Target("the same tables as Parquet files with a card, for datasets.load_dataset", export_dataset),
    "every-eval-ever": Target("JSON by the schema of evaleval/every_eval_ever", export_every_eval_ever),
    "hf": Target(".eval_results YAML of Hugging Face model repositories", export_hugging_face),
    "inspect": Target(".eval logs, for inspect's viewer", export_inspect),
}


def export_results(target: str, paths: Paths, out: str | Path, options: ExportOptions) -> ExportResult:
    """Export results to a new folder.

    Args:
        target: a key of :data:`TARGETS`.

    Raises:
        EditingError: for an unknown target, unreadable results, a folder that is not empty, and a missing package.
    """
    if target not in TARGETS:
        raise EditingError(f"unknown target {target!r}.{near_misses(target, TARGETS)} Accepted: {', '.join(TARGETS)}.")
    return TARGETS[target].write(ResultSet.of(paths), check_output_folder(out), options)
