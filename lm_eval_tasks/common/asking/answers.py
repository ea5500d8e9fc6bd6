"""Answers of any lm-eval model class as the types of :mod:`edit_hooks.answers`.

The model classes of lm-eval return ``(log-likelihood, is_greedy)`` or a text. Fields that such an answer lacks are
``None``; a metric that needs them is unscored, with :data:`NEEDS_EDITED_HF` as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from edit_hooks.answers import (
    IMMEDIATE,
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ScoredContinuation,
    Stage,
    StateSimilarity,
)
from judges.base import Verdict

NEEDS_EDITED_HF = (
    "this model class does not report {missing}; run with --model edited_hf "
    "(--model_args mode=none,... for an unedited model)"
)

IN_ROUNDS = (
    "the editor answers in rounds of sub-questions (mello) and takes the answer from the last one, so it has no tokens "
    "that continue the prompt; ask such an editor for texts (qaedit_wild, mquake_multi_hop), or take ice here"
)

UNFINISHED = (
    "the generation has no think_end_token, so its thought has no end and there is no answer; allow more tokens "
    "(max_thought_tokens=... in --model_args), or drop think_end_token for a model that does not think"
)

NOT_IN_STREAM = "not among this run's edits"  # of a case, which is not scored
NOT_FINITE = (
    "the logits are not finite (NaN or infinity), so there is no answer: an edit broke the model, or its precision "
    "overflows (try smaller steps, or dtype=float32)"
)

FACT_CUT = (
    "the prompt is too long, and an edited fact in it was cut away, so the question was not asked under the edit; "
    "allow a shorter answer or, if the model has more positions, a larger max_length, or state fewer facts"
)

Answer: TypeAlias = ScoredContinuation | GeneratedText | StateSimilarity | FailedAnswer | Verdict


def read_answer(raw: Any, stops: Iterable[str] = (), *, fixed_length: bool = False) -> Answer:
    """Convert one response of a model to a typed answer.

    Args:
        raw: an answer of `edited_hf` (its final answer is used), a typed answer, a stock ``(logprob, is_greedy)`` pair
            (or a list of two, as caches store it), or a stock text.
        stops: stop strings of the task, which cut generated texts.
        fixed_length: the answer has the length of a given text, which other model classes do not know.

    Returns:
        The answer; a `FailedAnswer` for any other type, for a stock text of a fixed length, and for an answer to a
        prompt that lost its edited fact, or whose fact a broken model was to choose.
    """
    if isinstance(raw, EditedAnswer):
        raw = raw.final
    context = raw.context if isinstance(raw, (GeneratedText, ScoredContinuation)) else None
    if context is not None and (context.fact_cut or context.no_choice):
        raw = FailedAnswer(FACT_CUT if context.fact_cut else NOT_FINITE, unedited=raw.unedited)
    if isinstance(raw, GeneratedText):
        return raw.until(stops)
    if isinstance(raw, FailedAnswer) and isinstance(raw.unedited, GeneratedText):
        return replace(raw, unedited=raw.unedited.until(stops))
    if isinstance(raw, (ScoredContinuation, StateSimilarity, FailedAnswer, Verdict)):
        return raw
    if isinstance(raw, str) and fixed_length:
        return FailedAnswer(NEEDS_EDITED_HF.format(missing="answers of a given length"), is_failure=False)
    if isinstance(raw, str):
        return GeneratedText(raw=raw, stops=tuple(stops))
    if isinstance(raw, Sequence) and len(raw) == 2:
        return ScoredContinuation(logprob=float(raw[0]), is_greedy=bool(raw[1]))
    return FailedAnswer(f"unreadable answer of type {type(raw).__name__}")


def filtered_answer(output: Any) -> EditedAnswer[Answer]:
    """The output of a filter pipeline of any kind: filters that do not run at all stages return bare answers."""
    if isinstance(output, EditedAnswer):
        return output
    return EditedAnswer(final=output, judged=isinstance(output, Verdict))


def answer_at(result: EditedAnswer[Answer], stage: Stage | None) -> Answer:
    """The answer at a stage; ``None`` is the final one.

    A failed edit has no stages, so its reason holds at all of them. An answer that is missing on the final model
    alone, as one with an unfinished thought, leaves those of earlier stages as they are.
    """
    if stage is None:
        return result.final
    if stage in result.stages:
        return result.stages[stage]
    if isinstance(result.final, FailedAnswer):
        return result.final
    if result.position is None:
        return FailedAnswer(NEEDS_EDITED_HF.format(missing="answers at stages of a stream"), is_failure=False)
    if isinstance(stage, str) and stage != IMMEDIATE and int(stage) > result.position.num_cases:
        reason = f"the stream ended after {result.position.num_cases} cases, before checkpoint {stage}"
        return FailedAnswer(reason, is_failure=False)
    reason = f"the model did not report its answers at stage {stage!r} of the stream"
    return FailedAnswer(reason, is_failure=False)


def why_no_answer(answer: GeneratedText | ScoredContinuation) -> str | None:
    """The reason why a model that was asked gave no answer; ``None`` if it gave one."""
    if not answer.is_finite:
        return NOT_FINITE
    return UNFINISHED if isinstance(answer, GeneratedText) and answer.unfinished else None


def why_without_tokens(answer: GeneratedText, missing: str = "token ids") -> str:
    """The reason why an answer has no token ids."""
    in_rounds = answer.context is not None and answer.context.rounds > 0
    return IN_ROUNDS if in_rounds else NEEDS_EDITED_HF.format(missing=missing)


def unedited_answer(answer: Answer) -> Answer:
    """The unedited model's generation; answers without one are unchanged."""
    if isinstance(answer, FailedAnswer):
        return answer.unedited or answer
    if not isinstance(answer, GeneratedText):
        return answer
    return answer.unedited or FailedAnswer(NEEDS_EDITED_HF.format(missing="the unedited model's answers"))
