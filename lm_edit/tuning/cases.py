"""Edit cases for the search over an editor's settings, from a benchmark or a file."""

from __future__ import annotations

from lm_eval_tasks.common.records import benchmark
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.settings import Settings


def load_cases(source: str, settings: Settings) -> list[Case]:
    """The cases of a benchmark, or of a JSON or JSONL file of records.

    Raises:
        EditingError: for an unknown source, unreadable data, and records that cannot be used.
    """
    return list(benchmark.load_cases(source, settings).records)
