"""Rows as ``lm_edit.load_results`` returns them, made by hand."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

import lm_edit.results.tables
from lm_edit.results.schema import RESULT_COLUMNS

COMMON: dict[str, Any] = {
    "model": "tiny", "model_hash": "abc", "model_parts": "", "mode": "single", "settings": "0000aaaa",
    "context_editor": False, "icl": "no", "seed": 0.0, "limit": math.nan, "benchmark": "",
    "task_version": "1.0", "samples": "",
    "data": "mini", "data_revision": "", "data_hash": "d1", "population": "all", "judge": "",
    "protocol": "likelihood", "stage": "", "filter": "none",
    "is_rate": True, "is_share": True, "is_total": False, "higher_is_better": True, "role": "", "stderr": math.nan,
    "n": 30.0,
    "excluded": math.nan,
    "failed": 0.0, "unscored": 0.0, "num_edits": math.nan, "edit_batch_size": math.nan, "group_size": math.nan,
    "edits": "", "edits_hash": "", "edit_options": "", "answer_options": "",
}  # fmt: skip


def row(editor: str, task: str, metric: str, value: float, **changes: Any) -> dict[str, Any]:
    """A row of one run; its ``run`` follows from what identifies a run, unless given."""
    values = {
        **dict.fromkeys(RESULT_COLUMNS),
        **COMMON,
        "editor": editor,
        "task": task,
        "metric": metric,
        "value": value,
    }
    values["editor_config"] = {}
    if editor == "unedited":
        values |= {"mode": "none", "settings": ""}
    if changes.get("is_rate") is False:
        values["is_share"] = False
    values |= changes
    if "run" not in changes:
        names = (
            "editor",
            "model",
            "mode",
            "settings",
            "num_edits",
            "edit_batch_size",
            "icl",
            "seed",
            "editor_config",
            "data",
        )
        values["run"] = hashlib.sha256(repr([values[name] for name in names]).encode()).hexdigest()[:12]
    return values


def frame(*rows: Mapping[str, Any]) -> pd.DataFrame:
    """The table of results."""
    return pd.DataFrame(list(rows), columns=list(RESULT_COLUMNS))


def pretend_results(monkeypatch: pytest.MonkeyPatch, rows: pd.DataFrame) -> None:
    """Give readers of result files these rows, whatever the paths."""
    monkeypatch.setattr(lm_edit.results.tables.ResultSet, "of", lambda paths: paths)
    monkeypatch.setattr(lm_edit.results.tables, "load_results", lambda paths: rows)
