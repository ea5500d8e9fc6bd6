"""Knowledge-editing benchmarks as lm-eval tasks, one folder each.

A benchmark, in this package or another one, imports the names below from here, and protocols from
``lm_eval_tasks.protocols``. Everything else is internal and can move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from lm_eval_tasks.common.records.benchmark import Benchmark, all_benchmarks, load_edit_requests
    from lm_eval_tasks.common.records.cases import Case, OmittedRecord, Question
    from lm_eval_tasks.common.records.dataset import Source
    from lm_eval_tasks.common.records.fields import Fields, source_id
    from lm_eval_tasks.common.records.published import HubFile, PublishedFile
    from lm_eval_tasks.common.scoring.population import POPULATION
    from lm_eval_tasks.common.settings import Setting, Settings, choice_setting
    from lm_eval_tasks.common.task.task import EditingTask

_HOMES = {
    "POPULATION": "common.scoring.population",
    "Benchmark": "common.records.benchmark",
    "Case": "common.records.cases",
    "EditingTask": "common.task.task",
    "Fields": "common.records.fields",
    "HubFile": "common.records.published",
    "OmittedRecord": "common.records.cases",
    "PublishedFile": "common.records.published",
    "Question": "common.records.cases",
    "Setting": "common.settings",
    "Settings": "common.settings",
    "Source": "common.records.dataset",
    "all_benchmarks": "common.records.benchmark",
    "choice_setting": "common.settings",
    "load_edit_requests": "common.records.benchmark",
    "source_id": "common.records.fields",
}

__all__ = [
    "POPULATION",
    "Benchmark",
    "Case",
    "EditingTask",
    "Fields",
    "HubFile",
    "OmittedRecord",
    "PublishedFile",
    "Question",
    "Setting",
    "Settings",
    "Source",
    "all_benchmarks",
    "choice_setting",
    "load_edit_requests",
    "source_id",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
