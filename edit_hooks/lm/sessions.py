"""Sessions: editing and answering in one mode of a run.

A session gets questions (token ids with the edits of their cases) and answers each under the right edits. It also
provides the scope in which lm-eval's own tasks (mmlu, glue, ...) run, and the facts about the edits for result files.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import (
    IMMEDIATE,
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ModelResult,
    ScoredContinuation,
    Stage,
    StateSimilarity,
    StreamPosition,
)
from edit_hooks.decoding import AskedModel
from edit_hooks.deltas.apply import UNEDITED_STATE, AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import EditReport, Effects
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.inference.items import Item
from edit_hooks.lm.editing.independent import FailedEdit, IndependentEdits, group_key
from edit_hooks.lm.editing.stream import EditStream
from edit_hooks.lm.options.plan import EditPlan
from edit_hooks.request import EditRequest, RequestGroup

# Computes the answers of jobs, which are items with the edit under which each is answered, or None. The text is the
# fingerprint of the edits that are in the weights meanwhile.
AnswerJobsOn: TypeAlias = Callable[[Sequence[tuple[Item, Delta | None]], str], Sequence[ModelAnswer]]
Answers: TypeAlias = Mapping[Item, ModelAnswer]


ABOUT_NO_EDIT = FailedAnswer(
    "the question is about no edit, and this run has no one edited model to ask; use mode=sequential, mode=batch "
    "without group_size, or load_edit=",
    is_failure=False,
)

OUTSIDE_OF_GROUPS = FailedAnswer("this case's edits are not (all) in one group of this run's edits", is_failure=False)


@dataclass(frozen=True)
class CaseQuestion:
    """One question of a case.

    Attributes:
        item: the question as token ids.
        requests: the edits of its case, in order; empty for a question about no edit, which an edited model is asked as
            a whole.
        asked: the model whose answer is needed, or both.
        cut: its prompt lost its beginning, because it was too long.
    """

    item: Item
    requests: RequestGroup
    asked: AskedModel
    cut: bool = False

    @property
    def ask_unedited(self) -> bool:
        """Whether the unedited model's answer is needed."""
        return self.asked != "edited"

    @property
    def ask_edited(self) -> bool:
        """Whether the edited model's answer is needed."""
        return self.asked != "unedited"


class Session(abc.ABC):
    """Edits and answers of one run.

    Attributes:
        editor_name: the editor behind the edits; ``None`` if nothing is edited, or if a saved edit does not name it.
        writes: parts that the edits of this run change: weights, hooks, context.
    """

    editor_name: str | None = None
    writes: tuple[str, ...] = ()

    @abc.abstractmethod
    def answer(
        self, questions: Sequence[CaseQuestion], unedited: Answers, answer_jobs: AnswerJobsOn
    ) -> list[ModelResult]:
        """Return the answers in the order of the questions.

        Args:
            unedited: the unedited model's answers to the items of questions with ``ask_unedited``.
            answer_jobs: runs the model.
        """

    @abc.abstractmethod
    def edits(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        """Yield the edits of independent ``groups``, else the steps of the run; memory need not hold them all."""

    def requests_as_edited(self, requests: Sequence[EditRequest]) -> list[EditRequest]:
        """Return a case's requests with the contexts in which they were edited, as far as those are known."""
        return list(requests)

    def stock_task_scope(self) -> contextlib.AbstractContextManager[Delta | None]:
        """Scope of lm-eval's own tasks; yields the part of the edits outside the weights."""
        return contextlib.nullcontext()

    @property
    def final_state(self) -> str | None:
        """Fingerprint of a stream's final weights, equal on all processes; else ``None``."""
        return None

    def result_metadata(self) -> dict[str, Any]:
        """JSON-able facts about the edits for result files: full configuration, steps."""
        return {"editor_config": None}


class UneditedSession(Session):
    """``mode=none``: answers every question on the unedited model."""

    def answer(
        self, questions: Sequence[CaseQuestion], unedited: Answers, answer_jobs: AnswerJobsOn
    ) -> list[ModelResult]:
        return [EditedAnswer(final=_with_unedited(unedited[q.item], q, unedited)) for q in questions]

    def edits(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        return iter(())


class SavedEditSession(Session):
    """``load_edit=``: answers every question under one saved edit.

    A question whose case is not among the edit's requests is answered too; its position has ``edited=False``.

    Args:
        report: editor, file and checksum for samples and results.
        requests: the requests in the edit by their keys without context; ``None`` if the file does not list them.
        measure_edits: measure what the edit does to neutral prompts and to its targets' likelihood.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        delta: Delta,
        report: EditReport,
        requests: Mapping[str, EditRequest] | None,
        measure_edits: bool = True,
    ) -> None:
        self.model, self.delta, self.requests = model, delta, requests
        self.editor_name, self.writes = report.editor, tuple(delta.writes)
        effects = EditEffects(model, tokenizer) if measure_edits and self.writes != ("context",) else None
        known = list((requests or {}).values())
        before = effects.target_nlls(known, None)[0] if effects else {}
        with AppliedDeltas(model) as applied:
            applied.add(delta)
            self._state = applied.state()
            measured = effects.of_step(applied.runtime_part, known, before) if effects else Effects()
            facts = {**report.diagnostics, "update_norm_ratio": applied.norm_ratio()}
        self.report = dataclasses.replace(report, effects=measured, diagnostics=facts).of_case()

    def answer(
        self, questions: Sequence[CaseQuestion], unedited: Answers, answer_jobs: AnswerJobsOn
    ) -> list[ModelResult]:
        with self.stock_task_scope() as runtime_part:
            answers = answer_distinct(
                (q.item for q in questions if q.ask_edited),
                lambda items: answer_jobs([(item, runtime_part) for item in items], self._state),
            )
        results: list[ModelResult] = []
        for question in questions:
            saved = self.requests
            edited = saved is None or all(request.without_context.key in saved for request in question.requests)
            count = len(saved or ())
            position = StreamPosition(
                edited=edited, step=0 if edited else None, num_edits=count, cases_before=0, num_cases=count
            )
            source = answers if question.ask_edited else unedited
            final = _with_unedited(source[question.item], question, unedited)
            results.append(EditedAnswer(final=final, edit=self.report if edited else None, position=position))
        return results

    def edits(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        yield self.delta

    def requests_as_edited(self, requests: Sequence[EditRequest]) -> list[EditRequest]:
        saved = self.requests or {}
        keys = [request.without_context.key for request in requests]
        return [saved[key] for key in keys if key in saved]

    @contextlib.contextmanager
    def stock_task_scope(self) -> Iterator[Delta | None]:
        with AppliedDeltas(self.model) as applied:
            applied.add(self.delta)
            yield applied.runtime_part

    def result_metadata(self) -> dict[str, Any]:
        return {"editor_config": None, "loaded_edit": self.report.to_json()}


class SingleEditSession(Session):
    """``mode=single``, and ``mode=batch`` in groups: independent groups of edits.

    Args:
        plan: if it has groups, a question is answered under the group of its case's edits, else under those edits.
    """

    def __init__(self, edits: IndependentEdits, plan: EditPlan) -> None:
        self.independent, self.plan = edits, plan
        self.editor_name, self.writes = edits.editor.name, edits.editor.writes

    def answer(
        self, questions: Sequence[CaseQuestion], unedited: Answers, answer_jobs: AnswerJobsOn
    ) -> list[ModelResult]:
        groups = [self._group_of(question) for question in questions]
        answers: dict[tuple[str, Item], ModelAnswer] = {}
        for edits in self.independent.portions(group for group in groups if group):
            jobs: dict[tuple[str, Item], Delta] = {}
            for question, group in zip(questions, groups, strict=True):
                edit = edits.get(group_key(group)) if group else None
                if group and isinstance(edit, Delta) and question.ask_edited:
                    jobs[group_key(group), question.item] = edit
            pairs = [(item, delta) for (_, item), delta in jobs.items()]
            answered = answer_jobs(pairs, UNEDITED_STATE) if jobs else ()
            answers |= zip(jobs, answered, strict=True)
        return [
            self._assemble(question, group, answers, unedited)
            for question, group in zip(questions, groups, strict=True)
        ]

    def edits(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        return self.independent.in_order(groups)

    def result_metadata(self) -> dict[str, Any]:
        edits = self.independent
        size = {"num_edits": self.plan.num_edits} if self.plan.groups else {}
        return {"editor_config": edits.config, "drawn_settings": edits.editor.drawn_settings(edits.model), **size}

    def _group_of(self, question: CaseQuestion) -> RequestGroup | None:
        if not self.plan.groups:
            return question.requests
        index = self.plan.group_of(question.requests)
        return None if index is None else self.plan.usable(self.plan.groups[index])

    def _assemble(
        self,
        question: CaseQuestion,
        group: RequestGroup | None,
        answers: Mapping[tuple[str, Item], ModelAnswer],
        unedited: Answers,
    ) -> ModelResult:
        if not question.requests:
            if question.ask_edited:
                return EditedAnswer(final=ABOUT_NO_EDIT)
            return EditedAnswer(final=_with_unedited(unedited[question.item], question, unedited))
        if group is None:
            return EditedAnswer(
                final=_not_answered(OUTSIDE_OF_GROUPS, question, unedited),
                position=StreamPosition(
                    edited=False,
                    step=None,
                    num_edits=self.plan.num_edits,
                    cases_before=0,
                    num_cases=self.plan.num_edits,
                ),
            )
        unusable = [reason for request in question.requests if (reason := self.plan.unusable.get(request.key))]
        if unusable:
            report = EditReport(editor=self.editor_name, error=unusable[0])
        else:
            report = self.independent.report(group_key(group), question.requests)
        if report.error is not None:
            return EditedAnswer(final=_edit_failed(report.error, question, unedited), edit=report)
        answer = answers[group_key(group), question.item] if question.ask_edited else unedited[question.item]
        return EditedAnswer(final=_with_unedited(answer, question, unedited), edit=report)


class StreamSession(Session):
    """``mode=batch`` (one step) and ``mode=sequential``: edits accumulate in weights.

    A question whose case is not in the stream is answered on the final weights; its position has ``edited=False``. A
    question about no edit is answered there and at checkpoints, and has no step.
    """

    def __init__(self, stream: EditStream, immediate: bool, retention: bool) -> None:
        self.stream, self.immediate, self.retention = stream, immediate, retention
        self.plan = stream.plan
        self.editor_name, self.writes = stream.editor.name, stream.editor.writes

    def answer(
        self, questions: Sequence[CaseQuestion], unedited: Answers, answer_jobs: AnswerJobsOn
    ) -> list[ModelResult]:
        steps = [self._step_of(question) for question in questions]
        checkpoints = self.plan.checkpoint_steps()
        checkpoint_steps = set(checkpoints.values())
        answers: dict[int, Answers] = {}

        own: dict[int | None, list[tuple[CaseQuestion, int | None]]] = {}  # by the step of their edits
        for question, edit_step in zip(questions, steps, strict=True):
            own.setdefault(edit_step, []).append((question, edit_step))

        def visitor(step: int, runtime_part: Delta | None) -> None:
            asks_all = self.retention or step in checkpoint_steps or step == self.stream.num_steps - 1
            items = [
                q.item
                for q, edit_step in (zip(questions, steps, strict=True) if asks_all else own.get(step, ()))
                if q.ask_edited and self._is_due(q, step, edit_step, checkpoint_steps)
            ]
            state = self.stream.state_after(step)
            answers[step] = answer_distinct(
                items, lambda distinct: answer_jobs([(item, runtime_part) for item in distinct], state)
            )

        self.stream.visit(visitor)
        unusable = self.stream.unusable
        return [
            self._assemble(question, edit_step, answers, unedited, checkpoints, unusable)
            for question, edit_step in zip(questions, steps, strict=True)
        ]

    def edits(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        self.stream.make()
        for step in range(len(self.stream.deltas)):
            delta = self.stream.whole(step)
            delta.effects = self.stream.reports[step].effects
            yield delta

    @contextlib.contextmanager
    def stock_task_scope(self) -> Iterator[Delta | None]:
        """Apply the whole stream."""
        self.stream.make()
        with AppliedDeltas(self.stream.model) as applied:
            for step in range(len(self.stream.deltas)):
                applied.add(self.stream.whole(step))
            yield applied.runtime_part

    @property
    def final_state(self) -> str | None:
        return self.stream.final_state

    def result_metadata(self) -> dict[str, Any]:
        return {
            "editor_config": self.stream.config,
            "drawn_settings": self.stream.editor.drawn_settings(self.stream.model),
            "num_edits": self.plan.num_edits,
            "unusable_edits": len(self.stream.unusable),
            "num_steps": len(self.plan.groups),
            "stopped": self.stream.stopped,
            "wrecked_at_step": self.stream.wrecked_at,
            "steps": [report.to_json() for report in self.stream.reports],
        }

    def _step_of(self, question: CaseQuestion) -> int | None:
        """Return the step of a case's last edit; ``None`` if the stream lacks an edit, or a required order."""
        return self.plan.group_of(question.requests)

    def _is_due(
        self, question: CaseQuestion, step: int, edit_step: int | None, checkpoint_steps: Collection[int]
    ) -> bool:
        """Whether to answer a question after ``step``.

        Always after the last step; after the step of its edit with ``immediate``; later at checkpoints, and after every
        step with ``retention``. A question about no edit is due at all checkpoints.
        """
        if step == self.stream.num_steps - 1 or (not question.requests and step in checkpoint_steps):
            return True
        if edit_step is None or edit_step > step:
            return False
        return (self.immediate and edit_step == step) or step in checkpoint_steps or self.retention

    def _assemble(
        self,
        question: CaseQuestion,
        edit_step: int | None,
        answers: Mapping[int, Answers],
        unedited: Answers,
        checkpoints: Mapping[int, int],
        unusable: Mapping[str, str],
    ) -> ModelResult:
        last = self.stream.num_steps - 1
        item = question.item
        reasons = [reason for request in question.requests if (reason := unusable.get(request.key))]
        edited = not question.requests or (edit_step is not None and edit_step <= last and not reasons)
        position = StreamPosition(
            edited=edited,
            step=edit_step,
            num_edits=self.stream.edits_after(last),
            cases_before=0 if edit_step is None else self.plan.cases_before(edit_step),
            num_cases=self.plan.cases_before(last + 1),
        )
        if edit_step is not None and not edited:
            reason = next(iter(reasons), self.stream.stopped or "the stream ended before this edit")
            report = EditReport(editor=self.editor_name, error=reason)
            return EditedAnswer(final=_edit_failed(reason, question, unedited), edit=report, position=position)
        final = _with_unedited(answers[last][item] if question.ask_edited else unedited[item], question, unedited)
        taken: dict[Stage, int] = {}  # stage -> step after which it is taken
        reached: dict[Stage, int] = {str(number): step for number, step in checkpoints.items() if step <= last}
        if edit_step is None:
            taken |= {} if question.requests or not question.ask_edited else reached
        elif question.ask_edited:
            taken |= {IMMEDIATE: edit_step} if self.immediate else {}
            taken |= {number: step for number, step in reached.items() if edit_step <= step}
            taken |= {step: step for step in range(edit_step, last + 1)} if self.retention else {}
        return EditedAnswer(
            final=final,
            stages={stage: answers[step][item] for stage, step in taken.items()},
            edit=None if edit_step is None else self.stream.report(edit_step),
            position=position,
        )


def _edit_failed(reason: str, question: CaseQuestion, unedited: Answers) -> ModelAnswer | FailedAnswer:
    """The answer to a question about a failed edit."""
    return _not_answered(FailedAnswer(f"edit failed: {reason}"), question, unedited)


def _not_answered(failed: FailedAnswer, question: CaseQuestion, unedited: Answers) -> ModelAnswer | FailedAnswer:
    """A missing answer of the edited model; the unedited model's, where the question needs it, is not lost."""
    if not question.ask_edited:
        return _with_unedited(unedited[question.item], question, unedited)
    before = unedited[question.item] if question.ask_unedited else None
    if isinstance(before, StateSimilarity):
        before = None
    return dataclasses.replace(failed, unedited=before)


def answer_distinct(
    items: Iterable[Item], answer_items: Callable[[Sequence[Item]], Sequence[ModelAnswer]]
) -> dict[Item, ModelAnswer]:
    """Return the answers by item; identical items are answered once."""
    distinct = list(dict.fromkeys(items))
    return dict(zip(distinct, answer_items(distinct), strict=True)) if distinct else {}


def _with_unedited(answer: ModelAnswer, question: CaseQuestion, unedited: Answers) -> ModelAnswer:
    """Add the unedited model's answer if the question needs it."""
    if not question.ask_unedited:
        return answer
    before = unedited[question.item]
    if isinstance(answer, ScoredContinuation):
        assert isinstance(before, ScoredContinuation)
        return dataclasses.replace(answer, unedited=before)
    assert isinstance(answer, GeneratedText) and isinstance(before, GeneratedText)
    return dataclasses.replace(answer, unedited=before)
