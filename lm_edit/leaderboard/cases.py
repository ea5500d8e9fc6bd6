"""Single cases of the runs for the page: what was asked, what the models answered, how the edit went."""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from edit_hooks.utils.storage.json_io import json_text
from lm_edit.results.answers.documents import CaseDocument, SavedResponse

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Longer texts are cut; the sample files have all of them.
MAX_TEXT = 2000
SIGNIFICANT_DIGITS = 5
EDIT_FIELDS = ("prompt", "subject", "target_new", "target_true")


class CaseText(NamedTuple):
    """A case as JSON texts: edits and questions; answers in their order, scores, facts about the edit."""

    task: str
    run: str
    doc_id: int
    asked: str
    answered: str


def text_of_case(document: CaseDocument) -> CaseText:
    """The texts of a case."""
    asked, answered = _to_text(_asked(document)), _to_text(_answered(document))
    return CaseText(document.task, document.run, document.doc_id, asked, answered)


class Cases:
    """Cases of all runs as JSON texts; what runs share is stored once. The order in which cases come is irrelevant."""

    def __init__(self, documents: Iterable[CaseDocument] = ()) -> None:
        # task -> run -> document -> (edits and questions; answers in their order, scores, facts about the edit)
        self._texts: dict[str, dict[str, dict[int, tuple[str, str]]]] = {}
        self._shared: dict[str, str] = {}
        self.add(documents)

    def add(self, documents: Iterable[CaseDocument]) -> None:
        """Add cases of runs."""
        self.add_texts(map(text_of_case, documents))

    def add_texts(self, texts: Iterable[CaseText]) -> None:
        """Add cases of runs as their texts."""
        for text in texts:
            of_run = self._texts.setdefault(text.task, {}).setdefault(text.run, {})
            of_run[text.doc_id] = self._shared.setdefault(text.asked, text.asked), text.answered

    def packed(self, budget: int) -> tuple[dict[str, Json], int]:
        """The cases of each task as compressed text, of at most ``budget`` bytes together.

        A text is that of :meth:`of_task`, compressed by gzip and in base64: the page unpacks a task when its cases are
        looked at.

        Returns:
            Task -> text, and k: of every task, the first of every k cases is kept; the same cases for all runs. 1: all
            of them. 0: none fits, and there are no texts.
        """
        step, texts = 1, self._packed(1)
        if self._size_of(texts) > budget:
            most = max((len(self._documents(task)) for task in self._texts), default=0)
            step = self._size_of(texts) // max(budget, 1) + 1
            while step <= most and self._size_of(texts := self._packed(step)) > budget:
                step += 1
            if step > most:
                return {}, 0
        return texts, step

    def _packed(self, step: int) -> dict[str, Json]:
        return {task: _pack(self.of_task(task, step)) for task in sorted(self._texts)}

    @staticmethod
    def _size_of(texts: Mapping[str, Json]) -> int:
        return len(to_json(dict(texts)))

    def _documents(self, task: str) -> list[int]:
        return sorted({doc for documents in self._texts[task].values() for doc in documents})

    def of_task(self, task: str, step: int = 1) -> str:
        """The first of every ``step`` documents of a task, as JSON.

        ``questions``: document -> edits and questions, as the first run with this document has them. ``answers``: run
        -> document -> answers, with ``asked`` where the run has other prompts, as with the new fact in them.
        """
        return _joined(*self._texts_of(task, self._documents(task)[::step]))

    def parts(self) -> Iterator[tuple[str, str, str]]:
        """Task, run and compressed text of all cases of a task in a run, as of :meth:`packed`."""
        for task in sorted(self._texts):
            questions, answers = self._texts_of(task, self._documents(task))
            for run, own in answers.items():
                yield task, run, _pack(_joined({doc: questions[doc] for doc in own}, {run: own}))

    def _texts_of(self, task: str, kept: Sequence[int]) -> tuple[dict[int, str], dict[str, dict[int, str]]]:
        """Document -> edits and questions, and run -> document -> answers, of some documents."""
        questions: dict[int, str] = {}
        answers: dict[str, dict[int, str]] = {}
        for run, documents in sorted(self._texts[task].items()):
            own = answers.setdefault(run, {})
            for doc in kept:
                if doc in documents:
                    asked, answered = documents[doc]
                    is_other = questions.setdefault(doc, asked) is not asked
                    own[doc] = f'{answered[:-1]},"asked":{asked}}}' if is_other else answered
        return {doc: questions[doc] for doc in kept}, answers


def _joined(questions: Mapping[int, str], answers: Mapping[str, Mapping[int, str]]) -> str:
    def listed(texts: Mapping[int, str]) -> str:
        return "{" + ",".join(f'"{doc}":{text}' for doc, text in texts.items()) + "}"

    runs = ",".join(f"{_to_text(run)}:{listed(own)}" for run, own in answers.items())
    return f'{{"answers":{{{runs}}},"questions":{listed(questions)}}}'


def _asked(document: CaseDocument) -> Json:
    return {
        "case": document.case_id,
        "category": document.category,
        "edits": [{name: _text(edit.get(name)) for name in EDIT_FIELDS} for edit in document.edits],
        "questions": [
            [question.kind, _text(question.prompt), _text(question.wanted), _text(question.target), question.draw]
            for question in document.questions
        ],
    }


def _answered(document: CaseDocument) -> Json:
    return {
        "answers": [
            {
                **{f"@{stage}": _response(answer) for stage, answer in question.answers.items()},
                **({} if question.unedited is None else {"unedited": _response(question.unedited)}),
            }
            for question in document.questions
        ],
        "scores": {name: plain(value) for name, value in document.metrics.items()},
        "reasons": {name: _text(reason) for name, reason in document.reasons.items()},
        "edit": {name: plain(value) for name, value in document.report.items() if name != "edited_texts"},
    }


def _pack(text: str) -> str:
    """Compressed text in base64; equal texts give equal ones."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _to_text(value: Json) -> str:
    return json_text(value, compact=True, sort_keys=True, allow_nan=False)


def to_json(value: Json) -> str:
    """Compact JSON that no HTML parser takes for a tag; sorted, without NaN."""
    text = _to_text(value)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _response(response: SavedResponse) -> Json:
    if response.failure is not None and response.text is None:
        return {"failure": _text(response.failure)}
    if response.similarity is not None:
        return {"similarity": _text(response.similarity)}
    if response.text is None:
        return {"logprob": plain(response.logprob), "tokens": response.num_tokens, "greedy": response.is_greedy}
    follows = (response.raw or "").removeprefix(response.text)
    parts = {"text": response.text, "follows": follows, "thought": response.thought or ""}
    return {name: _text(part) for name, part in parts.items() if part or name == "text"}


def _text(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} [... {len(text) - MAX_TEXT} more characters]"


def plain(value: object) -> Json:
    """A value of a sample file with fewer digits and without NaN."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return _text(str(value))
