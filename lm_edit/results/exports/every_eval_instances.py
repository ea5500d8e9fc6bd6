"""Instance-level records of Every Eval Ever: one for every scored case of every result that is a share of successes.

Source: ``instance_level_eval.schema.json`` of https://github.com/evaleval/every_eval_ever, version 0.2.2. It has one
record per sample and aggregate result, and each says whether the answer is correct. A case of an editing task may have
several questions; their texts are in one record, and a case is correct if its score is 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.utils.storage.json_io import json_text
from lm_edit.results.answers.documents import CaseDocument, SavedQuestion, SavedResponse, task_documents
from lm_edit.results.exports.inspect_log import response_text
from lm_edit.results.files.runs import ResultFile

SCHEMA_VERSION = "instance_level_eval_0.2.2"
NOT_ASKED = SavedResponse(failure="not asked at this stage")
BETWEEN = "\n\n"  # the questions of a case


class Instances:
    """Reads the cases of a task once, however many of its results have records."""

    def __init__(self) -> None:
        self._documents: dict[tuple[str, str], list[CaseDocument]] = {}

    def records(
        self, file: ResultFile, row: Mapping[str, Any], result_id: str, of_run: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield a record for every scored case of a result.

        Args:
            row: the result, of :func:`lm_edit.load_results`, a share of successes.
            result_id: of the aggregate result.
            of_run: ``evaluation_id`` and ``model_id``.
        """
        place = (str(file.path), str(row["task"]))
        if place not in self._documents:
            self._documents[place] = list(task_documents(file, row["task"]))
        name = f"{row['metric']}@{row['stage']}" if row["stage"] else row["metric"]
        for document in self._documents[place]:
            score = document.metrics.get(f"{name},{row['filter']}")
            if isinstance(score, (int, float)) and math.isfinite(score) and document.questions:
                yield {**_record(document, row, float(score), result_id), **of_run}


def _record(document: CaseDocument, row: Mapping[str, Any], score: float, result_id: str) -> dict[str, Any]:
    asked = [question for question in document.questions if question.answers.get(row["stage"])]
    asked = asked or list(document.questions)
    prompts = list(dict.fromkeys(question.prompt for question in asked))
    wanted = list(dict.fromkeys(question.wanted for question in asked if question.wanted))
    raw = BETWEEN.join(prompts)
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_name": row["task"],
        "evaluation_result_id": result_id,
        "sample_id": f"{document.task}/{document.case_id}",
        "sample_hash": hashlib.sha256("".join((raw, *wanted)).encode("utf-8", "replace")).hexdigest(),
        "interaction_type": "single_turn",
        "input": {"raw": raw, "reference": wanted},
        "output": {"raw": [_text(question, row["stage"]) for question in asked]},
        "answer_attribution": [],
        "evaluation": {"score": score, "is_correct": score == 1},
        "metadata": {"edits": _edits(document.edits), "metric": str(row["metric"])},
    }


def _text(question: SavedQuestion, stage: str) -> str:
    return response_text(question, question.answers.get(stage) or question.unedited or NOT_ASKED)


def _edits(edits: Sequence[Mapping[str, Any]]) -> str:
    return json_text([{name: edit.get(name) for name in ("prompt", "subject", "target_new")} for edit in edits])
