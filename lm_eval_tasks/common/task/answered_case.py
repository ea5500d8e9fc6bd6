"""A document with its answers after one filter pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.scoring.aggregation import SHORTENED_PROMPTS
from lm_eval_tasks.common.task.stages import FilteredAnswer, Stage


class AnsweredCase(NamedTuple):
    """A document and its answers after one filter pipeline."""

    doc: Mapping[str, Any]
    answers: Sequence[FilteredAnswer]

    @property
    def judged(self) -> bool:
        return any(answer.judged for answer in self.answers)

    @property
    def lead(self) -> FilteredAnswer:
        """The first answer that knows the case's edit; a question that the model cannot be asked has none."""
        return next((answer for answer in self.answers if answer.edit or answer.position), self.answers[0])

    @property
    def edit(self) -> dict[str, Any] | None:
        """Facts about the case's edit, and how many of its prompts are shorter than the edit makes them."""
        if (edit := self.lead.edit) is None:
            return None
        reports = [answer.context for answer in self.answers if answer.context is not None]
        shortened = {name: sum(map(is_so, reports)) for name, is_so in SHORTENED_PROMPTS.items()}
        return edit.to_json() | {name: number for name, number in shortened.items() if number}

    def at(self, stage: Stage | None) -> CaseAnswers:
        """The answers at one stage by probe; ``None`` is the final stage."""
        return CaseAnswers(self.doc, [answer.at(stage) for answer in self.answers])
