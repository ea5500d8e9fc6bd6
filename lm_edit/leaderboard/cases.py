"""Single cases of the runs for the page: what was asked, what the models answered, how the edit went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from edit_hooks.utils.json_io import json_text
from lm_edit.results.documents import CaseDocument, SavedResponse

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Longer texts are cut; the sample files have all of them.
MAX_TEXT = 2000
SIGNIFICANT_DIGITS = 5
EDIT_FIELDS = ("prompt", "subject", "target_new", "target_true")


class Cases:
    """Cases of all runs; what runs share is stored once.

    Attributes:
        questions: task -> document -> edits and questions, as the first run with this document has them.
        answers: run -> task -> document -> answers in the order of the questions, scores, facts about the edit.
    """

    def __init__(self) -> None:
        self.questions: dict[str, dict[int, dict[str, Json]]] = {}
        self.answers: dict[str, dict[str, dict[int, dict[str, Json]]]] = {}

    def add(self, document: CaseDocument) -> None:
        """Add one case of a run."""
        asked: dict[str, Json] = {
            "case": document.case_id,
            "category": document.category,
            "edits": [{name: _text(edit.get(name)) for name in EDIT_FIELDS} for edit in document.edits],
            "questions": [
                [question.kind, _text(question.prompt), _text(question.wanted), _text(question.target), question.draw]
                for question in document.questions
            ],
        }
        answered: dict[str, Json] = {
            "answers": [
                {
                    **{f"@{stage}": _response(answer) for stage, answer in question.answers.items()},
                    **({} if question.unedited is None else {"unedited": _response(question.unedited)}),
                }
                for question in document.questions
            ],
            "scores": {name: _plain(value) for name, value in document.metrics.items()},
            "reasons": {name: _text(reason) for name, reason in document.reasons.items()},
            "edit": {name: _plain(value) for name, value in document.report.items() if name != "edited_texts"},
        }
        documents = self.questions.setdefault(document.task, {})
        if documents.setdefault(document.doc_id, asked) != asked:
            answered["asked"] = asked  # other prompts, as with the new fact in them
        self.answers.setdefault(document.run, {}).setdefault(document.task, {})[document.doc_id] = answered

    def payload(self, budget: int) -> tuple[dict[str, Json], int]:
        """The cases as JSON values of at most ``budget`` bytes.

        Returns:
            The values, and k: of every task, the first of every k cases is kept, with k the smallest that fits; the
            same cases for all runs. 0 if none fits.
        """
        sizes = {
            (task, doc): _size(asked) for task, documents in self.questions.items() for doc, asked in documents.items()
        }
        for tasks in self.answers.values():
            for task, documents in tasks.items():
                for doc, answered in documents.items():
                    sizes[task, doc] += _size(answered)
        positions = {
            (task, doc): number
            for task, documents in self.questions.items()
            for number, doc in enumerate(sorted(documents))
        }
        most = max(positions.values(), default=0) + 1
        for step in range(1, most + 1):
            kept = {case for case, position in positions.items() if position % step == 0}
            if sum(sizes[case] for case in kept) <= budget:
                return self._values(kept), step
        return self._values(set()), 0

    def _values(self, kept: set[tuple[str, int]]) -> dict[str, Json]:
        def of(task: str, documents: Mapping[int, dict[str, Json]]) -> Json:
            return {str(doc): documents[doc] for doc in sorted(documents) if (task, doc) in kept}

        return {
            "questions": {task: of(task, self.questions[task]) for task in sorted(self.questions)},
            "answers": {
                run: {task: of(task, tasks[task]) for task in sorted(tasks)}
                for run, tasks in sorted(self.answers.items())
            },
        }


def collect_cases(documents: Iterable[CaseDocument]) -> Cases:
    """Read the cases of all runs, in the order of run, task and document, whatever that of the files."""
    cases = Cases()
    for document in sorted(documents, key=lambda document: (document.run, document.task, document.doc_id)):
        cases.add(document)
    return cases


def _size(value: Json) -> int:
    """Bytes in the page, with a comma and the name of the document."""
    return len(to_json(value).encode()) + 12


def to_json(value: Json) -> str:
    """Compact JSON that no HTML parser takes for a tag; sorted, without NaN."""
    text = json_text(value, compact=True, sort_keys=True, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _response(response: SavedResponse) -> Json:
    if response.failure is not None and response.text is None:
        return {"failure": _text(response.failure)}
    if response.cosine is not None:
        return {"cosine": _plain(response.cosine)}
    if response.text is None:
        return {"logprob": _plain(response.logprob), "tokens": response.num_tokens, "greedy": response.is_greedy}
    follows = (response.raw or "").removeprefix(response.text)
    parts = {"text": response.text, "follows": follows, "thought": response.thought or ""}
    return {name: _text(part) for name, part in parts.items() if part or name == "text"}


def _text(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} [... {len(text) - MAX_TEXT} more characters]"


def _plain(value: object) -> Json:
    """A value of a sample file with fewer digits and without NaN."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return _text(str(value))
