"""Knowledge-editing benchmarks as lm-eval tasks, one folder each; see README.md.

A benchmark, in this package or another one, imports the names below from here, and protocols from
``lm_eval_tasks.protocols``. Everything else is internal and can move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from lm_eval_tasks.common.benchmark import Benchmark, all_benchmarks, load_edit_requests
    from lm_eval_tasks.common.cases import Case, LeftOut, Question
    from lm_eval_tasks.common.dataset import Source
    from lm_eval_tasks.common.fields import Fields, source_id
    from lm_eval_tasks.common.population import POPULATION
    from lm_eval_tasks.common.published import HubFile, PublishedFile
    from lm_eval_tasks.common.settings import Setting, Settings, choice_setting
    from lm_eval_tasks.common.task import EditingTask

_HOMES = {
    "POPULATION": "common.population",
    "Benchmark": "common.benchmark",
    "Case": "common.cases",
    "EditingTask": "common.task",
    "Fields": "common.fields",
    "HubFile": "common.published",
    "LeftOut": "common.cases",
    "PublishedFile": "common.published",
    "Question": "common.cases",
    "Setting": "common.settings",
    "Settings": "common.settings",
    "Source": "common.dataset",
    "all_benchmarks": "common.benchmark",
    "choice_setting": "common.settings",
    "load_edit_requests": "common.benchmark",
    "source_id": "common.fields",
}

__all__ = [
    "POPULATION",
    "Benchmark",
    "Case",
    "EditingTask",
    "Fields",
    "HubFile",
    "LeftOut",
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
