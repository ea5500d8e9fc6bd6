"""Made-up results in the form of lm_edit.results, for leaderboards and their statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lm_edit import CaseDocument, SavedQuestion, SavedResponse
from lm_edit.leaderboard.board import Board, Row
from lm_edit.leaderboard.table import build_board

COMMON: dict[str, Any] = {
    "file": "results_1.json",
    "date": 1763800000.0,
    "model": "demo",
    "model_hash": "5f22a9bff021",
    "model_parts": "",
    "editor_label": "",
    "mode": "single",
    "settings": "0badcafe",
    "settings_origin": "shipped",
    "context_editor": False,
    "num_edits": None,
    "edit_batch_size": None,
    "group_size": None,
    "edits": "",
    "edits_hash": "",
    "icl": "no",
    "edit_options": "",
    "answer_options": "",
    "seed": 0,
    "limit": None,
    "task_version": "1.0",
    "samples": "",
    "data": "mini",
    "data_revision": "",
    "data_hash": "fcc802ba1fad",
    "population": "",
    "judge": "",
    "protocol": "log-probability of two answers",
    "stage": "",
    "filter": "none",
    "role": "",
    "higher_is_better": True,
    "is_rate": True,
    "is_share": True,
    "is_total": False,
    "chance": None,
    "excluded": 0,
    "failed": 0,
    "unscored": 0,
}


def frames(scores: Mapping[str, Mapping[str, Sequence[float | None]]], **common: Any) -> tuple[Any, Any]:
    """Results and cases of runs: editor -> "task/metric" -> score of each case, ``None`` where unscored."""
    results, cases = [], []
    for editor, columns in scores.items():
        for name, values in columns.items():
            task, metric = name.split("/")
            row = run_row(editor, task, metric, values, **common)
            results.append(row)
            cases += case_rows(row, values)
    return pd.DataFrame(results), pd.DataFrame(cases)


def run_row(editor: str, task: str, metric: str, values: Sequence[float | None], **common: Any) -> dict[str, Any]:
    scored = [value for value in values if value is not None]
    missing = len(values) - len(scored)
    identity = {**COMMON, "editor": editor, **({"mode": "none"} if editor == "unedited" else {}), **common}
    fields = (identity["model_hash"], editor, identity["mode"], identity["settings"], identity["num_edits"])
    return {
        "run": hashlib.sha256(
            repr((*fields, identity["model_parts"], identity["seed"], identity["data"], identity["icl"])).encode()
        ).hexdigest()[:12],
        "run_name": f"{editor} {identity['mode']} {identity['data']}",
        "editor_config": {},
        **identity,
        "task": task,
        "benchmark": task.split("_")[0],
        "metric": metric,
        "value": sum(scored) / len(scored) if scored else float("nan"),
        "stderr": float("nan"),
        "n": len(scored),
        "unscored": missing,
        "unscored_reason": {"empty answer": missing} if missing else {},
    }


def case_rows(row: Mapping[str, Any], values: Iterable[float | None]) -> list[dict[str, Any]]:
    return [
        {
            **{name: row[name] for name in ("run", "task", "metric", "stage", "filter")},
            "doc_id": number,
            "case_id": str(number),
            "category": "",
            "value": float("nan") if value is None else value,
            "due": True,
            "n": int(value is not None),
            "excluded": 0,
            "failed": 0,
            "reason": "" if value is not None else "empty answer",
            "components": None,
        }
        for number, value in enumerate(values)
    ]


def document(row: dict[str, Any], number: int, answer: str, *, value: float | None = 1.0) -> CaseDocument:
    """A case with one edit, one generated answer and one pair of continuations."""
    before = SavedResponse(text=" Paris", raw=" Paris.")
    pair = [
        SavedQuestion(
            kind="neighborhood",
            prompt="The tower of Pisa is in",
            wanted="Italy",
            target=target,
            answers={"": SavedResponse(logprob=logprob, num_tokens=1, is_greedy=logprob > -1)},
            unedited=SavedResponse(logprob=-2.0, num_tokens=1, is_greedy=False),
        )
        for target, logprob in (("Italy", -0.5), ("Rome", -3.25))
    ]
    generated = SavedQuestion(
        kind="efficacy",
        prompt=f"Q: Where is tower {number}?\nA:",
        wanted="Rome",
        target=None,
        answers={"": SavedResponse(text=answer, raw=answer + ".\nQ: and then?")},
        unedited=before,
    )
    return CaseDocument(
        run=row["run"],
        task=row["task"],
        **{name: (COMMON | row)[name] for name in ("file", "task_version", "data_hash", "protocol", "judge")},
        doc_id=number,
        case_id=str(number),
        category="",
        edits=[{"prompt": "{} is in", "subject": f"tower {number}", "target_new": "Rome", "target_true": "Paris"}],
        questions=[generated, *pair],
        metrics={f"{row['metric']},none": value},
        reasons={} if value is not None else {f"{row['metric']},none": "empty answer"},
        report={"editor": row["editor"], "final_loss": 0.0461234567, "steps": 14, "stop_reason": "loss"},
    )


def board(*parts: tuple[pd.DataFrame, pd.DataFrame]) -> Board:
    results, cases = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    return build_board(results, cases, resamples=199)


def rows_of(board: Board, section: int = 0) -> dict[str, Row]:
    return {row.label: row for row in board.sections[section].rows}


def one_seed(values: list[list[float]]) -> np.ndarray:
    """(cases, components) -> (cases, 1, components)."""
    return np.array(values, dtype=np.float64)[:, np.newaxis]


def es(**scores: list[float | None]) -> dict[str, dict[str, list[float | None]]]:
    return {editor: {"bake_es/efficacy_prob": values} for editor, values in scores.items()}
