"""Edit cases for the search over an editor's settings, from a benchmark or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edit_hooks.prompt_context import BARE, PromptContext
from lm_eval_tasks.common.records import benchmark
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.settings import Settings


def load_cases(source: str, settings: Settings) -> list[Case]:
    """The cases of a benchmark, or of a JSON or JSONL file of records.

    Raises:
        EditingError: for an unknown source, unreadable data, and records that cannot be used.
    """
    return list(benchmark.load_cases(source, settings).records)


def in_context(cases: Sequence[Case], context: PromptContext) -> list[Case]:
    """The cases with their edits made and all their questions asked in a context.

    Raises:
        EditingError: a prompt that the context changes.
    """

    def asked(questions: Sequence[Question]) -> list[Question]:
        return [question._replace(prompt=context.wrap(question.prompt)) for question in questions]

    if context == BARE:
        return list(cases)
    return [
        replace(
            case,
            request=case.request.in_context(context),
            further_requests=[request.in_context(context) for request in case.further_requests],
            paraphrases=asked(case.paraphrases),
            neighbors=asked(case.neighbors),
        )
        for case in cases
    ]
