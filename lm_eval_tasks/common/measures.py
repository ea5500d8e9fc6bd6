"""From answers to the score of one case. What cannot be scored raises `Unscored` with the reason.

A task's scorer (``process_results`` in its YAML) returns, for each of its metrics, a function without arguments that
computes the value from these measures; :func:`evaluate` turns value, reason or exclusion into a `Score`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from edit_hooks.answers import FailedAnswer, GeneratedText, ScoredContinuation
from judges.base import CORRECT, Verdict
from judges.match import alias_match, exact_match
from lm_eval_tasks.common import scoring
from lm_eval_tasks.common.answers import NEEDS_EDITED_HF, Answer

Measure: TypeAlias = Callable[[], Any]


class Unscored(Exception):
    """The value cannot be known; the message is the reason. Not an error of the program and not a zero."""


class Excluded(Exception):
    """The benchmark's own published filter leaves this case out of this metric."""


@dataclass(frozen=True)
class Score:
    """A value, or the reason why there is none; ``excluded`` when a published filter is that reason.

    A value with several components may have both: the reason then says why some of them are missing.
    """

    value: Any = None
    reason: str | None = None
    excluded: bool = False


def evaluate(measure: Measure) -> Score:
    """Run a measure and record what came of it; a value that is not a finite number is unscored."""
    try:
        value = measure()
    except Unscored as unscored:
        return Score(reason=str(unscored))
    except Excluded:
        return Score(excluded=True)
    if isinstance(value, float) and not math.isfinite(value):
        return Score(reason=f"value is {value}")
    return value if isinstance(value, Score) else Score(value=value)


def case_mean(values: Iterable[float], what: str) -> float:
    """Mean over the probes of a case; one unscored probe leaves the whole case unscored, as published (BAKE)."""
    numbers = list(values)
    if not numbers:
        raise Unscored(f"the record has no {what}")
    return math.fsum(numbers) / len(numbers)


def likelihood(answer: Answer | None, *, unedited: bool = False) -> ScoredContinuation:
    """The answer as a likelihood with a finite value, of the edited or the unedited model."""
    if isinstance(answer, FailedAnswer):
        raise Unscored(answer.reason)
    if not isinstance(answer, ScoredContinuation):
        raise Unscored(f"a likelihood was asked for, the answer is a {type(answer).__name__}")
    if unedited:
        if answer.unedited is None:
            raise Unscored(NEEDS_EDITED_HF.format(what="the unedited model's answers"))
        answer = answer.unedited
    if not math.isfinite(answer.logprob):
        raise Unscored(f"log-probability is {answer.logprob}")
    return answer


def generation(answer: Answer | None, *, unedited: bool = False) -> GeneratedText:
    """The answer as a generation, of the edited or the unedited model."""
    if isinstance(answer, FailedAnswer):
        raise Unscored(answer.reason)
    if not isinstance(answer, GeneratedText):
        raise Unscored(f"a generation was asked for, the answer is a {type(answer).__name__}")
    if not unedited:
        return answer
    if answer.unedited is None:
        raise Unscored(NEEDS_EDITED_HF.format(what="the unedited model's answers"))
    return answer.unedited


def nll(answer: Answer, *, unedited: bool = False) -> float:
    """Mean negative log-likelihood per target token."""
    found = likelihood(answer, unedited=unedited)
    if found.num_tokens is None:
        raise Unscored(NEEDS_EDITED_HF.format(what="token counts"))
    return scoring.mean_nll(found.logprob, found.num_tokens)


def prob(wanted: Answer, other: Answer, *, unedited: bool = False) -> float:
    """PROB: is the wanted target strictly more likely per token than the other one?"""
    return scoring.prefers(nll(wanted, unedited=unedited), nll(other, unedited=unedited))


def prob_magnitude(wanted: Answer, other: Answer) -> float:
    """By how much: difference of the two per-token probabilities."""
    return scoring.magnitude(nll(wanted), nll(other))


def argmax(answer: Answer) -> float:
    """TF-EXACT: every teacher-forced argmax is the target's token."""
    return float(likelihood(answer).is_greedy)


def match(answer: Answer) -> float:
    """TF-MATCH: share of target tokens that are the teacher-forced argmax."""
    found = likelihood(answer)
    if found.token_argmax is None or found.token_ids is None:
        raise Unscored(NEEDS_EDITED_HF.format(what="token ids"))
    return scoring.share_equal(found.token_argmax, found.token_ids)


def agree_tf(answer: Answer) -> float:
    """AGREE-TF: share of positions along the gold answer at which edited and unedited argmax agree."""
    before, after = likelihood(answer, unedited=True).token_argmax, likelihood(answer).token_argmax
    if before is None or after is None:
        raise Unscored(NEEDS_EDITED_HF.format(what="token ids"))
    if len(before) != len(after):
        raise Unscored(f"edited and unedited model saw {len(after)} and {len(before)} target tokens")
    return scoring.share_equal(after, before)


def agree_gen(answer: Answer | None) -> float:
    """AGREE-GEN: edited and unedited model generate the same token ids, all of them."""
    before, after = generation(answer, unedited=True).token_ids, generation(answer).token_ids
    if before is None or after is None:
        raise Unscored(NEEDS_EDITED_HF.format(what="token ids"))
    return scoring.all_equal(after, before)


def both_empty(answer: Answer | None) -> float:
    """1 if neither model wrote anything before the stop rule: such pairs agree, and say little about locality."""
    texts = generation(answer, unedited=True).text, generation(answer).text
    return float(not any(text.strip() for text in texts))


def generated_match(answer: Answer | None, gold: str, *, unedited: bool = False) -> float:
    """EM: the generation up to its natural stop equals the gold answer after normalization."""
    return float(exact_match(generation(answer, unedited=unedited).text, gold))


def generated_contains(answer: Answer | None, gold: str) -> float:
    """The generation up to its natural stop contains the gold answer as whole words, after normalization."""
    return float(alias_match(generation(answer).text, [gold]))


def verdict(answer: Answer | None) -> float:
    """A judge's verdict: 1 correct, 0 incorrect."""
    if isinstance(answer, FailedAnswer):
        raise Unscored(answer.reason)
    if not isinstance(answer, Verdict):
        raise Unscored(f"a verdict was asked for, the answer is a {type(answer).__name__}")
    if answer.label is None:
        raise Unscored(f"judge: {answer.unscored_reason}")
    return float(answer.label == CORRECT)
