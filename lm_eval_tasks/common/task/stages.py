"""Stages of a stream of edits (``mode=sequential``) at which a case is scored.

An answer of `edited_hf` holds the answer on the final model and those right after the case's own edit (``immediate``),
at checkpoints, and after every later step (``retention``). All of them answer the same question, so all run through the
same filters and the same scorer.

The stages that a task reports depend on its settings alone, so every document and every rank has the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.instance import Instance

from edit_hooks.answers import (
    IMMEDIATE,
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ScoredContinuation,
    Stage,
    StreamPosition,
)
from edit_hooks.utils.errors import EditingError
from judges.base import Verdict
from lm_eval_tasks.common import settings as task_settings
from lm_eval_tasks.common.asking.answers import NOT_IN_STREAM
from lm_eval_tasks.common.task.harness import filter_classes

RETENTION = "retention"


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


def filter_all_stages(instances: Sequence[Instance], pipelines: Sequence[FilterEnsemble], stages: StreamStages) -> None:
    """Run every filter pipeline over the answers of all stages.

    The ``filtered_resps`` of each instance get an `EditedAnswer` per pipeline.

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
            final, response = outputs.pop(None), instance.resps[0]
            instance.filtered_resps[pipeline.name] = (
                response.filtered(final, outputs, judged=judged)
                if isinstance(response, EditedAnswer)
                else EditedAnswer(final=final, stages=outputs, judged=judged)
            )


def _is_helper(instance: Instance) -> bool:
    return bool(instance.doc["asked"]["model"] == "unedited")


def is_judge(pipeline: FilterEnsemble) -> bool:
    """Whether a filter class of the pipeline declares ``judges = True``.

    Without that declaration, a pipeline counts as a judge's as soon as one of its outputs is a verdict
    about an answer of the edited model.
    """
    return any(getattr(filter_class, "judges", False) for filter_class in filter_classes(pipeline))


def _answers_by_stage(response: Any, stages: StreamStages) -> dict[Any, Any]:
    """The final answer, under ``None``, and those at the reported stages, which get the unedited model's answer."""
    if not isinstance(response, EditedAnswer) or response.position is None:
        return {None: response}
    if response.position.not_in_stream and not stages.score_outside:
        return {None: FailedAnswer(NOT_IN_STREAM, is_failure=False)}  # no judge call for an answer that is not scored
    reported: list[Stage] = [stage for stage in stages.columns if stage in response.stages]
    if stages.retention:
        reported += [stage for stage in response.stages if isinstance(stage, int)]
    with_unedited = {stage: _with_unedited(response.stages[stage], response.final) for stage in reported}
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
