"""Stages of a stream of edits (``mode=sequential``) at which a case is scored.

An answer of `edited_hf` holds the answer on the final model and those right after the case's own edit (``immediate``),
at checkpoints, and after every later step (``retention``). All of them answer the same question, so all run through the
same filters and the same scorer.

The stages that a task reports depend on its settings alone, so every document and every rank has the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.instance import Instance

from edit_hooks.answers import (
    ContextReport,
    EditedAnswer,
    EditReport,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ScoredContinuation,
    StreamPosition,
)
from edit_hooks.utils.errors import EditingError
from judges.base import Verdict
from lm_eval_tasks.common import settings as task_settings
from lm_eval_tasks.common.asking.answers import NEEDS_EDITED_HF, Answer
from lm_eval_tasks.common.task.harness import filter_classes

NOT_IN_STREAM = "not among this run's edits"

IMMEDIATE, RETENTION = "immediate", "retention"

# "immediate", a checkpoint's number of cases as a text, or the number of a step (counted from 0)
Stage: TypeAlias = str | int


@dataclass(frozen=True, kw_only=True)
class StreamStages:
    """The stages that a task reports besides the final one.

    Attributes:
        immediate: report the score right after each case's own edit.
        checkpoints: numbers of cases; at each, report the score over the cases edited so far.
        retention: report the matrix of all earlier steps' cases, scored again after every step.
        score_outside: also score cases that are not among the run's edits, on the final weights.
    """

    immediate: bool = False
    checkpoints: tuple[int, ...] = ()
    retention: bool = False
    score_outside: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> StreamStages:
        """The stages of a task's settings; raises EditingError for invalid values."""
        score_outside = task_settings.SCORE_UNEDITED_CASES.read(settings)
        if score_outside and settings.get("mode") == "batch" and (size := settings.get("group_size")) is not None:
            raise EditingError(
                "score_unedited_cases=true asks the one edited model of a run about cases that are not among its "
                f"edits, but group_size={size} gives every group of cases a model of its own. Drop one of the two."
            )
        if settings.get("mode") != "sequential":
            return cls(score_outside=score_outside)
        return cls(
            immediate=task_settings.IMMEDIATE.read(settings),
            checkpoints=task_settings.CHECKPOINTS.read(settings),
            retention=task_settings.RETENTION.read(settings),
            score_outside=score_outside,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The stages with a column of their own, under the name that follows the ``@``."""
        return (*((IMMEDIATE,) if self.immediate else ()), *map(str, self.checkpoints))

    def applies_to(self, stage: str, position: StreamPosition | None) -> bool:
        """Whether a case is scored at a stage.

        It is never scored before its edit, and never if it is not in the stream. A question about no edit is scored at
        every checkpoint.

        A checkpoint is taken at the first step that reaches it. It therefore includes every step before which fewer
        cases were edited.
        """
        if position is None:
            return True
        if position.step is None:
            return position.edited and stage != IMMEDIATE
        return stage == IMMEDIATE or position.cases_before < int(stage)


@dataclass(frozen=True, kw_only=True)
class FilteredAnswer:
    """The answer to one request after one filter pipeline.

    Attributes:
        final: the answer; in a stream, that of the final model.
        stages: the answers at other stages of a stream.
        position: the case's position in the stream; ``None`` outside streams and from other model classes.
        edit: report on the case's edit; ``None`` without an edit.
        judged: a judge decides in this pipeline, even if this request had nothing to judge.
        only_unedited: the unedited model's answer, which is the same at all stages.
        context: what the edit put before the question, and what of it did not fit.
    """

    final: Answer
    stages: Mapping[Stage, Answer] = field(default_factory=dict)
    position: StreamPosition | None = None
    edit: EditReport | None = None
    judged: bool = False
    only_unedited: bool = False
    context: ContextReport | None = None

    def __str__(self) -> str:
        return str(self.final)

    @classmethod
    def of(cls, answer: Any) -> FilteredAnswer:
        """Wrap the output of a filter, unless it is wrapped.

        Filters that run outside :func:`filter_all_stages` return bare answers.
        """
        return answer if isinstance(answer, cls) else cls(final=answer, judged=isinstance(answer, Verdict))

    def at(self, stage: Stage | None) -> Answer:
        """The answer at a stage; ``None`` is the final one.

        A failed edit has no stages, so its reason holds at all of them. An answer that is missing on the final model
        alone, as one with an unfinished thought, leaves those of earlier stages as they are.
        """
        if stage is None or self.only_unedited:
            return self.final
        if stage in self.stages:
            return self.stages[stage]
        if isinstance(self.final, FailedAnswer):
            return self.final
        if self.position is None:
            return FailedAnswer(NEEDS_EDITED_HF.format(missing="answers at stages of a stream"), is_failure=False)
        if isinstance(stage, str) and stage != IMMEDIATE and int(stage) > self.position.num_cases:
            reason = f"the stream ended after {self.position.num_cases} cases, before checkpoint {stage}"
            return FailedAnswer(reason, is_failure=False)
        reason = f"the model did not report its answers at stage {stage!r} of the stream"
        return FailedAnswer(reason, is_failure=False)


def filter_all_stages(instances: Sequence[Instance], pipelines: Sequence[FilterEnsemble], stages: StreamStages) -> None:
    """Run every filter pipeline over the answers of all stages.

    The ``filtered_resps`` of each instance get a `FilteredAnswer` per pipeline.

    Only the first response of an instance counts; padding on several ranks may append copies of it.
    """
    by_stage = [_answers_by_stage(instance.resps[0], stages) for instance in instances]
    for pipeline in pipelines:
        # One copy of the instance per stage, so that a filter sees all answers at once and a judge batches them.
        copies = [
            replace(instance, resps=[answer], filtered_resps={})
            for instance, answers in zip(instances, by_stage, strict=True)
            for answer in answers.values()
        ]
        pipeline.apply(copies)
        filtered = [copy.filtered_resps[pipeline.name] for copy in copies]
        # A verdict about a helper's answer selects cases and scores none.
        own = [answer for copy, answer in zip(copies, filtered, strict=True) if not _is_helper(copy)]
        judged = is_judge(pipeline) or any(isinstance(answer, Verdict) for answer in own)
        queue = iter(filtered)
        for instance, answers in zip(instances, by_stage, strict=True):
            outputs = {stage: next(queue) for stage in answers}
            response = instance.resps[0]
            is_edited = isinstance(response, EditedAnswer)
            instance.filtered_resps[pipeline.name] = FilteredAnswer(
                final=outputs[None],
                stages={stage: output for stage, output in outputs.items() if stage is not None},
                position=response.position if is_edited else None,
                edit=response.edit if is_edited else None,
                judged=judged,
                only_unedited=_is_helper(instance),
                context=getattr(response.final, "context", None) if is_edited else None,
            )


def _is_helper(instance: Instance) -> bool:
    return bool(instance.doc["asked"]["model"] == "unedited")


def is_judge(pipeline: FilterEnsemble) -> bool:
    """Whether a filter class of the pipeline declares ``judges = True``.

    Without that declaration, a pipeline counts as a judge's as soon as one of its outputs is a verdict
    about an answer of the edited model.
    """
    return any(getattr(filter_class, "judges", False) for filter_class in filter_classes(pipeline))


def _answers_by_stage(response: Any, stages: StreamStages) -> dict[Stage | None, Any]:
    """The final answer and those at the reported stages.

    Each has the unedited model's answer attached.
    """
    if not isinstance(response, EditedAnswer) or response.position is None:
        return {None: response}
    if response.position.not_in_stream and not stages.score_outside:
        return {None: FailedAnswer(NOT_IN_STREAM, is_failure=False)}  # no judge call for an answer that is not scored
    answers: dict[Stage | None, ModelAnswer] = {}
    if stages.immediate and response.immediate is not None:
        answers[IMMEDIATE] = response.immediate
    reached = [number for number in stages.checkpoints if number in response.checkpoints]
    answers |= {str(number): response.checkpoints[number] for number in reached}
    if stages.retention:
        for step, answer in response.after_step.items():
            answers[step] = answer
    with_unedited = {stage: _with_unedited(answer, response.final) for stage, answer in answers.items()}
    return {None: response.final, **with_unedited}


def _with_unedited(answer: ModelAnswer, final: ModelAnswer | FailedAnswer) -> ModelAnswer:
    """The answer of a stage with the unedited model's, which only the final answer to the question holds.

    A `StateSimilarity` compares with the unedited model itself.
    """
    if isinstance(answer, ScoredContinuation) and isinstance(final, ScoredContinuation):
        return replace(answer, unedited=final.unedited)
    if isinstance(answer, GeneratedText) and isinstance(final, GeneratedText):
        return replace(answer, unedited=final.unedited)
    return answer
