"""Task managers for the folder of our tasks, without lm-eval's own thousands; its files are indexed once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from paths import ROOT

FOLDER = ROOT / "lm_eval_tasks"


@functools.cache
def _indexed() -> TaskManager:
    return TaskManager(include_path=FOLDER, include_defaults=False)


def task_manager(metadata: Mapping[str, Any]) -> TaskManager:
    """A manager whose tasks get these metadata."""
    manager = copy.copy(_indexed())
    manager.metadata = dict(metadata)
    manager._factory = TaskFactory(meta=manager.metadata)
    return manager
