"""Answers of ``edited_hf`` as typed values with a JSON format.

Inference produces them, tasks consume them, and lm-eval writes them into sample files. A model answers a question with
a :class:`ScoredContinuation`, a :class:`GeneratedText` or a :class:`StateSimilarity`. The result of a request is an
:class:`EditedAnswer`: the answer under the case's edits and, if required, the unedited model's answer, the answers at
other stages of a stream, and a report on the edit. ``str()`` of it is its JSON text, which contains :data:`FORMAT`. A
filter pipeline of a task makes another :class:`EditedAnswer` of it, with the answers that its filters returned.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from edit_hooks.edit_report import EditReport
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import plain_numbers
from edit_hooks.utils.text.readable import readable

FORMAT = "lm-eval-editing/answer/1"

IMMEDIATE = "immediate"
# A stage of a stream besides the final one: IMMEDIATE, right after the case's own edit; a checkpoint's number of cases
# as a text; or the number of a step, counted from 0.
Stage: TypeAlias = str | int

# not_finite: the largest logit of the next token was NaN or infinite, so there is no answer.
StopReason = Literal["eos", "stop_string", "length", "not_finite"]


@dataclass(frozen=True, kw_only=True)
@readable
class ContextReport:
    """Text that a context edit put before a question, and whether the prompt was too long.

    Attributes:
        facts, demonstrations: number in the prompt.
        left_out: number of demonstrations that did not fit.
        cut: the prompt, or that of a round, lost its beginning because it was too long even without demonstrations;
            without a context edit a report has this alone.
        fact_cut: an edited fact, or between rounds the question, was truncated, so the answer does not count as
            edited.
        rounds: rounds of sub-questions behind the answer, which then has no tokens that continue the prompt; 0 without.
        best_fact: index, in the order of the edits, of the fact that fits the question best, also where it is not
            stated because it does not fit well enough; ``None`` where there was nothing to choose.
        scope_score, similarity: of this fact: the score of a memory's scope classifier (SERAC), or its cosine
            similarity with the question (IKE, ICE); ``None`` where the other one decides.
        reply: the text by which the model chose among the facts (SCR); ``None`` where it was not asked.
        stated: the fact that it chose; ``None`` if none is relevant.
        no_choice: the logits of that reply are not finite, so the answer does not count as edited.
    """

    facts: int = 0
    demonstrations: int = 0
    left_out: int = 0
    cut: bool = False
    fact_cut: bool = False
    rounds: int = 0
    best_fact: int | None = None
    scope_score: float | None = None
    similarity: float | None = None
    reply: str | None = None
    stated: str | None = None
    no_choice: bool = False


class LoglikelihoodPair(tuple[float, bool]):
    """lm-eval's answer to a `loglikelihood` request of an ordinary task, with the number of tokens scored.

    Equal to the pair of log-probability and greediness.
    """

    num_tokens: int

    def __new__(cls, logprob: float, is_greedy: bool, num_tokens: int) -> LoglikelihoodPair:
        pair = super().__new__(cls, (logprob, is_greedy))
        pair.num_tokens = num_tokens
        return pair

    def __getnewargs__(self) -> tuple[Any, ...]:  # copies and pickled objects call __new__ again
        return (*self, self.num_tokens)


class BrokenText(str):
    """lm-eval's answer to a `generate_until` request of an ordinary task, if some of its logits were not finite."""


def is_broken(answer: object) -> bool:
    """Whether the logits behind an answer to an ordinary task, as lm-eval's classes return it, were not finite."""
    if isinstance(answer, (tuple, list)):
        return bool(answer) and is_broken(answer[0])
    return isinstance(answer, BrokenText) or (isinstance(answer, float) and math.isnan(answer))


@dataclass(frozen=True, kw_only=True)
@readable
class ScoredContinuation:
    """Log-likelihood of a continuation under teacher forcing.

    Attributes:
        logprob: sum over the continuation's tokens, in nats.
        is_greedy: every token is the argmax at its position.
        token_ids, token_logprobs, token_argmax: one entry per token; ``None`` where the model class reports none.
        unedited: the unedited model's answer to the same question, if required.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None
    token_argmax: tuple[int, ...] | None = None
    context: ContextReport | None = None
    unedited: ScoredContinuation | None = None

    def __post_init__(self) -> None:
        entries = [field for field in (self.token_ids, self.token_logprobs, self.token_argmax) if field is not None]
        if len({len(field) for field in entries}) > 1 or not all(entries):
            raise ValueError(f"token fields of {[len(field) for field in entries]} entries; one per token is needed")

    @property
    def num_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)

    @property
    def is_finite(self) -> bool:
        """Whether the logits had a distribution; a target of probability 0 (-inf) is an answer."""
        return not math.isnan(self.logprob)

    def __str__(self) -> str:
        return f"logprob={self.logprob:.6g} tokens={self.num_tokens} greedy={self.is_greedy}"


@dataclass(frozen=True, kw_only=True)
@readable
class GeneratedText:
    """A free generation.

    Attributes:
        raw: the text as generated, after the thought. stops: the task's stop strings; :attr:`text` ends before the
            first of them.
        token_ids: generated tokens after the thought; ``None`` from model classes that do not report them.
        stop: why generation ended, likewise.
        thought: text up to the end of the thought, of models that think before the answer (``think_end_token``).
        unfinished: the thought has no end, so there is no answer.
        target_ids: tokens of the text that fixed the length of the answer, where one did.
        unedited: the unedited model's answer to the same question, if required.
    """

    raw: str
    stops: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    stop: StopReason | None = None
    thought: str | None = None
    unfinished: bool = False
    target_ids: tuple[int, ...] | None = None
    context: ContextReport | None = None
    unedited: GeneratedText | None = None

    @property
    def text(self) -> str:
        """The text up to its natural stop."""
        return truncate(self.raw, self.stops)

    @property
    def is_finite(self) -> bool:
        """Whether the logits of every token had a distribution; otherwise :attr:`raw` ends where they had none."""
        return self.stop != "not_finite"

    def until(self, stops: Iterable[str]) -> GeneratedText:
        """Return the same generation, and the unedited one, cut at other stop strings."""
        stops = tuple(stops)
        unedited = None if self.unedited is None else self.unedited.until(stops)
        return dataclasses.replace(self, stops=stops, unedited=unedited)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class StateSimilarity:
    """How alike the edited and the unedited model are at a prompt's last token; what is compared is not part of it.

    Attributes:
        cosine: of their hidden states.
        overlap: of their distributions of the next token, in its place: one minus the total variation.
    """

    cosine: float | None = None
    overlap: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:.6g}" for name, value in self.values().items())

    def values(self) -> dict[str, float]:
        """The measured value by its name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
@readable
class FailedAnswer:
    """No usable answer: the edit failed, or the model returned something unexpected.

    Attributes:
        reason: one sentence.
        is_failure: the edit or the model is at fault; else the answer was not asked for, or the question has none.
        unedited: the unedited model's answer to the same question, if required; a failed edit does not concern it.
    """

    reason: str
    is_failure: bool = True
    unedited: ScoredContinuation | GeneratedText | None = None

    def with_unedited(self) -> ScoredContinuation | GeneratedText | None:
        """The unedited model's answer, in the place where an answer of the edited model has it."""
        if isinstance(self.unedited, ScoredContinuation):
            return dataclasses.replace(self.unedited, unedited=self.unedited)
        return None if self.unedited is None else dataclasses.replace(self.unedited, unedited=self.unedited)

    def __str__(self) -> str:
        return f"[unscored: {self.reason}]"


ModelAnswer: TypeAlias = ScoredContinuation | GeneratedText | StateSimilarity
AnswerT_co = TypeVar("AnswerT_co", covariant=True)
OtherT = TypeVar("OtherT")


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """Position of a case in a stream of edits.

    Attributes:
        edited: the case's edits, if it has any, are in the final model.
        step: the step of the case's last edit, counted from 0; ``None`` if the stream lacks one, or if there is none.
        num_edits: number of edits in the final model, fewer than planned if the guard stopped the stream.
        cases_before: number of cases that the stream edits before this step; 0 without a step.
        num_cases: number of cases of the steps in the final model, which checkpoints count.
    """

    edited: bool
    step: int | None
    num_edits: int
    cases_before: int
    num_cases: int

    @property
    def not_in_stream(self) -> bool:
        """Whether the stream lacks an edit of the case."""
        return self.step is None and not self.edited


@dataclass(frozen=True, kw_only=True)
@readable
class EditedAnswer(Generic[AnswerT_co]):
    """Result of one request of a document with edits: the model's, or what a filter pipeline made of that.

    Attributes:
        final: the answer under the edits (in a stream: on the final model), or the reason for its absence.
        stages: in a stream, the answers at other stages: right after the case's own edit, at checkpoints, and after
            every step from its own on.
        edit: report on the edit; ``None`` for the unedited model.
        position: the case's position in a stream; ``None`` if cases are edited independently, and from other model
            classes.
        judged: whether a judge decides in the filter pipeline, even if this request had nothing to judge; ``None`` for
            the model's own answers.
        context: after a filter pipeline, whose answers need not hold it: what the edit put before the question.
    """

    final: AnswerT_co
    stages: Mapping[Stage, AnswerT_co] = field(default_factory=dict)
    edit: EditReport | None = None
    position: StreamPosition | None = None
    judged: bool | None = None
    context: ContextReport | None = None

    def __str__(self) -> str:
        """The JSON text of the model's own answers, the final one after a filter pipeline: the texts of samples."""
        if self.judged is not None:
            return str(self.final)
        return json.dumps(cast(ModelResult, self).to_json(), ensure_ascii=False, allow_nan=False)

    def filtered(
        self: ModelResult, final: OtherT, stages: Mapping[Stage, OtherT], *, judged: bool
    ) -> EditedAnswer[OtherT]:
        """Return the result with the answers that a filter pipeline made of the model's own."""
        context = getattr(self.final, "context", None)
        return EditedAnswer(
            final=final, stages=stages, edit=self.edit, position=self.position, judged=judged, context=context
        )

    def to_json(self: ModelResult) -> dict[str, Any]:
        """Return a mapping of plain JSON values; NaN and infinities become strings."""
        record: dict[str, Any] = {"format": FORMAT}
        if isinstance(self.final, FailedAnswer):
            record["error"] = self.final.reason
            if not self.final.is_failure:
                record["is_failure"] = False
            if self.final.unedited is not None:
                record["unedited"] = answer_to_json(self.final.unedited)
        else:
            record["answer"] = answer_to_json(self.final)
        if self.edit is not None:
            record["edit"] = plain_numbers(self.edit.to_json())
        if self.position is not None:
            record["stream"] = dataclasses.asdict(self.position)
        for stage, answer in self.stages.items():
            assert not isinstance(answer, FailedAnswer)  # a failed edit has no stages
            if stage == IMMEDIATE:
                record[IMMEDIATE] = answer_to_json(answer)
            else:
                kind = "after_step" if isinstance(stage, int) else "checkpoints"
                record.setdefault(kind, {})[str(stage)] = answer_to_json(answer)
        return record

    @staticmethod
    def from_json(record: Mapping[str, Any], *, with_report: bool = True) -> ModelResult:
        """Inverse of :meth:`to_json`.

        Args:
            with_report: read the report on the edit, too; a reader of many answers may not need it.

        Raises:
            EditingError: for another format or an incomplete record.
        """
        if record.get("format") != FORMAT:
            raise EditingError(f"this answer has the format {record.get('format')!r}; {FORMAT!r} is needed.")
        try:
            return EditedAnswer(
                final=_failed_from_json(record) if "error" in record else answer_from_json(record["answer"]),
                edit=EditReport.from_json(record["edit"]) if with_report and "edit" in record else None,
                position=StreamPosition(**record["stream"]) if "stream" in record else None,
                stages=_stages_from_json(record),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EditingError(f"this answer cannot be read: {type(error).__name__}: {error}.") from None


ModelResult: TypeAlias = EditedAnswer[ModelAnswer | FailedAnswer]


def answer_to_json(answer: ModelAnswer) -> dict[str, Any]:
    """Return a mapping of plain JSON values.

    Absent fields are left out, and so are stop strings, which belong to the task.
    """
    if isinstance(answer, StateSimilarity):
        return {"kind": "states", **plain_numbers(answer.values())}
    record: dict[str, Any] = {"kind": "scored" if isinstance(answer, ScoredContinuation) else "generated"}
    for item in dataclasses.fields(answer):
        value = getattr(answer, item.name)
        if (
            value is None
            or item.name in ("unedited", "context", "stops")
            or (item.name, value) == ("unfinished", False)
        ):
            continue
        record[item.name] = plain_numbers(value)
    if answer.context is not None:
        context = dataclasses.asdict(answer.context)
        record["context"] = {name: value for name, value in context.items() if value is not None}
    if answer.unedited is not None:
        record["unedited"] = answer_to_json(answer.unedited)
    return record


def _failed_from_json(record: Mapping[str, Any]) -> FailedAnswer:
    unedited = answer_from_json(record["unedited"]) if "unedited" in record else None
    if isinstance(unedited, StateSimilarity):
        raise ValueError("the unedited model has no similarity with itself")
    return FailedAnswer(record["error"], is_failure=bool(record.get("is_failure", True)), unedited=unedited)


def answer_from_json(record: Mapping[str, Any]) -> ModelAnswer:
    """Inverse of :func:`answer_to_json`.

    Raises:
        KeyError, TypeError, ValueError: for anything else.
    """
    fields: dict[str, Any] = {name: value for name, value in record.items() if name != "kind"}
    if record["kind"] == "states":
        (name,) = fields
        return StateSimilarity(**{name: float(fields[name])})
    if "context" in fields:
        fields["context"] = ContextReport(**fields["context"])
    if "unedited" in fields:
        fields["unedited"] = answer_from_json(fields["unedited"])
    for name in ("token_ids", "token_argmax", "target_ids"):
        if name in fields:
            fields[name] = tuple(map(int, fields[name]))
    if record["kind"] == "generated":
        return GeneratedText(**fields)
    if record["kind"] != "scored":
        raise ValueError(f"unknown kind of answer {record['kind']!r}")
    if "token_logprobs" in fields:
        fields["token_logprobs"] = tuple(map(float, fields["token_logprobs"]))
    return ScoredContinuation(**{**fields, "logprob": float(fields["logprob"])})


def truncate(text: str, stops: Iterable[str]) -> str:
    """Cut a text at the first occurrence of a non-empty stop string."""
    starts = [start for stop in stops if stop and (start := text.find(stop)) >= 0]
    return text[: min(starts)] if starts else text


def _stages_from_json(record: Mapping[str, Any]) -> dict[Stage, ModelAnswer]:
    saved: dict[Stage, Any] = {IMMEDIATE: record[IMMEDIATE]} if IMMEDIATE in record else {}
    saved |= {str(int(number)): answer for number, answer in record.get("checkpoints", {}).items()}
    saved |= {int(step): answer for step, answer in record.get("after_step", {}).items()}
    return {stage: answer_from_json(answer) for stage, answer in saved.items()}
