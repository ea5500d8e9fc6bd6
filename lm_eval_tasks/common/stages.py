"""Cases in a stream of edits (``mode=sequential``): the stages at which their questions were answered.

`edited_hf` hands in a case's answer on the final weights, and inside it the answers right after the case's own edit
(``immediate``), at checkpoints, and after every later step (``retention``). Each is the same question with another
answer, so all of them run through the same filters and the same scorer.

Which stages a task reports follows from its settings alone, so that every document and every rank has the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lm_eval.api.filter import FilterEnsemble
from lm_eval.api.instance import Instance

from edit_hooks.utils.options import parse_checkpoints, switch
from judges.base import Verdict
from lm_eval_tasks.common.answers import NEEDS_EDITED_HF, Answer, Failed

OUTSIDE = "not among this run's edits"


IMMEDIATE, RETENTION = "immediate", "retention"


# "immediate", a checkpoint's number of edits as a text, or the number of a step (counted from 0)
Stage: TypeAlias = str | int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case stands in the run's stream.

    Attributes:
        edited: its edit is in the final weights.
        step: the step that makes its edit, counted from 0; ``None`` when the stream does not have it.
        num_edits: edits in the final weights, fewer than planned if the stream was stopped.
    """

    edited: bool
    step: int | None
    num_edits: int

    @property
    def outside(self) -> bool:
        """The case belongs to the task but not to this run's edits."""
        return self.step is None and not self.edited


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a task reports besides the final score.

    Attributes:
        immediate: the score right after each case's own edit.
        checkpoints: numbers of edits; at each the score over the cases edited so far.
        retention: the matrix of all earlier steps' cases, asked again after every step.
        batch_size: edits in one step.
        score_outside: also score cases that are not among the run's edits, on the final weights.
    """

    immediate: bool = False
    checkpoints: tuple[int, ...] = ()
    retention: bool = False
    batch_size: int = 1
    score_outside: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Stages:
        """From a task's settings; raises EditingError for values that cannot be read."""
        score_outside = switch(settings, "score_unedited_cases", False)
        if settings.get("mode") != "sequential":
            return cls(score_outside=score_outside)
        return cls(
            immediate=switch(settings, IMMEDIATE, True),
            checkpoints=parse_checkpoints(settings.get("checkpoints")),
            retention=switch(settings, RETENTION, False),
            batch_size=int(settings.get("edit_batch_size") or 1),
            score_outside=score_outside,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The stages that have a column of their own, as it is named after the ``@``."""
        return (*((IMMEDIATE,) if self.immediate else ()), *map(str, self.checkpoints))

    def concerns(self, stage: str, place: Place | None) -> bool:
        """Whether a case is to be scored at a stage: not before its edit, and never if it is not in the stream.

        A checkpoint is taken at the first step that reaches it: it sees every step before which fewer edits were made.
        """
        if place is None:
            return True
        if place.step is None:
            return False
        return stage == IMMEDIATE or place.step * self.batch_size < int(stage)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A request's answer as one filter pipeline read it.

    Attributes:
        final: the answer; in a stream that on the final weights.
        stages: the answers at other stages of a stream.
        place: the case's place in the stream; ``None`` outside streams and from other model classes.
        edit: diagnostics of the case's edit, with ``error`` if it failed; ``None`` without an edit.
        judged: a judge decides in this pipeline, also where there was nothing to judge.
    """

    final: Answer
    stages: Mapping[Stage, Answer] = field(default_factory=dict)
    place: Place | None = None
    edit: Mapping[str, Any] | None = None
    judged: bool = False

    def __str__(self) -> str:
        return str(self.final)

    @classmethod
    def of(cls, answer: Any) -> Reading:
        """A reading as it is; an answer that comes from a filter alone, without its stages."""
        return answer if isinstance(answer, cls) else cls(final=answer, judged=isinstance(answer, Verdict))

    def at(self, stage: Stage | None) -> Answer:
        """The answer at a stage; ``None`` is the final one."""
        if stage is None or isinstance(self.final, Failed):
            return self.final
        if stage in self.stages:
            return self.stages[stage]
        if self.place is None:
            return Failed(NEEDS_EDITED_HF.format(what="answers at stages of a stream"))
        if isinstance(stage, str) and stage != IMMEDIATE and int(stage) > self.place.num_edits:
            return Failed(f"the stream ended after {self.place.num_edits} edits, before checkpoint {stage}")
        return Failed(f"the model did not report its answers at stage {stage!r} of the stream")


def read_all(instances: Sequence[Instance], pipelines: Sequence[FilterEnsemble], stages: Stages) -> None:
    """Run every filter pipeline over the answers of all stages; leaves a `Reading` in each ``filtered_resps``.

    Only the first response of an instance counts; padding on several ranks may append more, which are copies.
    """
    raws = [_raw_answers(instance.resps[0], stages) for instance in instances]
    for pipeline in pipelines:
        copies = [
            replace(instance, resps=[raw], filtered_resps={})
            for instance, of_stages in zip(instances, raws, strict=True)
            for raw in of_stages.values()
        ]
        pipeline.apply(copies)
        filtered = [copy.filtered_resps[pipeline.name] for copy in copies]
        judged = is_judge(pipeline) or any(isinstance(answer, Verdict) for answer in filtered)
        queue = iter(filtered)
        for instance, of_stages in zip(instances, raws, strict=True):
            answers = {stage: next(queue) for stage in of_stages}
            raw = instance.resps[0]
            instance.filtered_resps[pipeline.name] = Reading(
                final=answers[None],
                stages={stage: answer for stage, answer in answers.items() if stage is not None},
                place=read_place(raw),
                edit=read_edit(raw),
                judged=judged,
            )


def is_judge(pipeline: FilterEnsemble) -> bool:
    """A filter class may say ``judges = True``; without it a pipeline is a judge's when a verdict comes out of it."""
    return any(getattr(getattr(step, "func", step), "judges", False) for step in pipeline.filters)


def read_place(raw: Any) -> Place | None:
    """The case's place in the stream, as the model tells it."""
    stream = raw.get("stream") if isinstance(raw, Mapping) else None
    if not isinstance(stream, Mapping):
        return None
    step = stream.get("step")
    return Place(
        edited=bool(stream.get("edited")),
        step=None if step is None else int(step),
        num_edits=int(stream.get("num_edits") or 0),
    )


def read_edit(raw: Any) -> dict[str, Any] | None:
    """Diagnostics of the edit under which an answer was given; of a failed edit at least its ``error``."""
    if not isinstance(raw, Mapping):
        return None
    edit = raw.get("edit")
    found = dict(edit) if isinstance(edit, Mapping) else {}
    place = read_place(raw)
    if raw.get("error") and not (place and place.outside):
        found["error"] = str(raw["error"])
    return found or None


def _raw_answers(raw: Any, stages: Stages) -> dict[Stage | None, Any]:
    """A response and those it holds for the reported stages, each with the one answer of the unedited model."""
    place = read_place(raw)
    if place is None:
        return {None: raw}
    if place.outside and not stages.score_outside:
        return {None: Failed(OUTSIDE)}  # spares judges what will not be scored
    stream = raw["stream"]
    found: dict[Stage | None, Any] = {}
    if stages.immediate and IMMEDIATE in stream:
        found[IMMEDIATE] = stream[IMMEDIATE]
    asked = {str(number) for number in stages.checkpoints}
    found |= {key: answer for key, answer in (stream.get("checkpoints") or {}).items() if key in asked}
    if stages.retention:
        found |= {int(step): answer for step, answer in (stream.get("after_step") or {}).items()}
    unedited = {"unedited": raw["unedited"]} if "unedited" in raw else {}
    return {None: raw, **{stage: {**answer, **unedited} for stage, answer in found.items()}}
