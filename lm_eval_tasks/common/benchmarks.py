"""The edits of a benchmark without its questions, for runs that edit first and ask whatever they like afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, near_misses

# name of a benchmark or of its group -> (folder, subset)
BENCHMARKS = {
    "bake": ("bake", "qa"),
    "bake_qj": ("bake", "qa"),
    "bake_j": ("bake", "judge"),
    "qaedit": ("qaedit", None),
    "qaedit_syn": ("qaedit", None),
    "qaedit_wild": ("qaedit", None),
}


def load_edit_requests(benchmark: str, settings: Mapping[str, Any]) -> list[EditRequest]:
    """All edits of a benchmark in file order, from the same data its tasks read.

    Args:
        benchmark: a key of :data:`BENCHMARKS`.
        settings: as the tasks' metadata: ``data``, ``data_revision``, ``bad_records``, ``pretrained``.

    Raises:
        EditingError: for an unknown benchmark, and for data that cannot be read.
    """
    if benchmark not in BENCHMARKS:
        raise EditingError(
            f"no edits of benchmark {benchmark!r}.{near_misses(benchmark, BENCHMARKS)} "
            f"Accepted: {', '.join(BENCHMARKS)}, or a JSONL file of edit requests."
        )
    folder, subset = BENCHMARKS[benchmark]
    return importlib.import_module(f"lm_eval_tasks.{folder}.utils").edit_requests(settings, subset)


def benchmark_files() -> dict[str, str]:
    """Published file name -> name of the benchmark it belongs to."""
    found: dict[str, str] = {}
    for folder in sorted({folder for folder, _ in BENCHMARKS.values()}):
        records = importlib.import_module(f"lm_eval_tasks.{folder}.records")
        for source in records.ALL_SOURCES:
            found |= dict.fromkeys(source.files, source.name)
    return found
