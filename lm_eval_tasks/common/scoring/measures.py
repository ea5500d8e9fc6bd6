"""Score of one case from its answers.

A value that cannot be computed raises `Unscored` with the reason.

A task's scorer (``process_results`` in its YAML) returns one *measure* per metric: a function without arguments that
computes the value. :func:`evaluate` turns its value, reason or exclusion into a `Score`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from edit_hooks.answers import FailedAnswer, GeneratedText, ScoredContinuation, StateSimilarity
from judges.base import CORRECT, Verdict
from judges.match import alias_match, exact_match, words
from judges.squad import squad_match
from lm_eval_tasks.common.asking.answers import NEEDS_EDITED_HF, Answer, why_no_answer, why_without_tokens
from lm_eval_tasks.common.asking.probes import ProbeAnswers
from lm_eval_tasks.common.scoring import primitives as scoring

Measure: TypeAlias = Callable[[], Any]
ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT", ScoredContinuation, GeneratedText)


class Unscored(Exception):
    """The value is unknown, for the reason in the message.

    This is neither a program error nor a zero.
    """


class Failed(Unscored):
    """The edit or the model gave no usable answer; as a share of successes, the value could be counted as 0."""


class Excluded(Exception):
    """The benchmark's published filter excludes this case from this metric."""


@dataclass(frozen=True)
class Score:
    """The value of a metric for one case.

    Attributes:
        value: the value; ``None`` if unscored or excluded.
        reason: why the value, or some component of it, is missing.
        excluded: a published filter excludes the case.
        failed: the value is missing because the edit or the model gave no usable answer.
        over_questions: mean and number of the case's questions, if the value averages over them.
    """

    value: Any = None
    reason: str | None = None
    excluded: bool = False
    failed: bool = False
    over_questions: dict[str, float] | None = None

    def weighted(self) -> Score:
        """The score as `pooled_mean` reads it; a value that is no mean over questions counts as one question."""
        if self.value is None:
            return self
        return replace(self, value=self.over_questions or {"value": self.value, "weight": 1})


@dataclass(frozen=True)
class ComponentMeasure:
    """A measure whose value has several components, each of which may be unscored or excluded.

    Attributes:
        factors: per factor of an edit score the measures whose mean it is.
    """

    factors: Sequence[Sequence[Measure]]

    def __call__(self) -> Score:
        """The value of each component, ``None`` if it is unscored or excluded.

        Raises:
            Unscored: if all components are.
        """
        evaluated = [[evaluate(measure) for measure in factor] for factor in self.factors]
        reasons = dict.fromkeys(score.reason for factor in evaluated for score in factor if score.reason is not None)
        values = [[score.value for score in factor] for factor in evaluated]
        if all(value is None for factor in values for value in factor):
            raise Unscored("; ".join(reasons) or "no component")
        return Score(value=values, reason="; ".join(reasons) or None)


def parts_of(measure: Measure) -> Sequence[Measure]:
    """The measures of which a measure consists; in general the measure alone."""
    if isinstance(measure, ComponentMeasure):
        return [part for factor in measure.factors for part in factor]
    return [measure]


def evaluate(measure: Measure) -> Score:
    """Run a measure.

    A float that is not finite is unscored; a `Score` is returned unchanged.
    """
    try:
        value = measure()
    except Unscored as unscored:
        return Score(reason=str(unscored), failed=isinstance(unscored, Failed))
    except Excluded:
        return Score(excluded=True)
    if isinstance(value, float) and not math.isfinite(value):
        return Score(reason=f"value is {value}", failed=True)
    if isinstance(value, CaseMean):
        return Score(value=float(value), over_questions={"value": value.total / value.count, "weight": value.count})
    return value if isinstance(value, Score) else Score(value=value)


class CaseMean(float):
    """Mean over the questions of a case.

    Attributes:
        total: sum over the questions. A mean of means, as over kinds of questions, has the questions of all of them.
        count: number of questions.
    """

    total: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> CaseMean:
        """The mean of single values or of means; at least one."""
        mean = cls(math.fsum(values) / len(values))
        mean.total = math.fsum(value.total if isinstance(value, cls) else value for value in values)
        mean.count = sum(value.count if isinstance(value, cls) else 1 for value in values)
        return mean


def case_mean(values: Iterable[float], noun: str) -> CaseMean:
    """Mean over the probes of a case.

    One unscored probe leaves the whole case unscored, as published (BAKE).

    Args:
        noun: the missing questions, for the reason if there are none, as in ``paraphrase prompts``.
    """
    numbers = list(values)
    if not numbers:
        raise Unscored(f"the record has no {noun}")
    return CaseMean.of(numbers)


def mean_over(probes: Sequence[ProbeAnswers], noun: str, measure: Callable[[ProbeAnswers], float]) -> Measure:
    """Case-first macro average: the mean of a measure over the probes of one case."""
    return lambda: case_mean((measure(answered) for answered in probes), noun)


def any_true(items: Iterable[ItemT], test: Callable[[ItemT], object]) -> bool:
    """Whether a test holds for some item; a missing answer matters only if it holds for no other.

    Raises:
        Unscored: the first one of a test, if the others do not hold.
    """
    missing: Unscored | None = None
    for item in items:
        try:
            if test(item):
                return True
        except Unscored as reason:
            missing = missing or reason
    if missing is not None:
        raise missing
    return False


def all_true(items: Iterable[ItemT], test: Callable[[ItemT], object]) -> bool:
    """Whether a test holds for all items; a missing answer matters only if it fails for no other.

    Raises:
        Unscored: the first one of a test, if the others hold.
    """
    return not any_true(items, lambda item: not test(item))


def exclude_if(measure: Measure, is_excluded: Callable[[], float]) -> Measure:
    """A measure under a published filter.

    What the filter excludes is excluded also where the edit failed, so that editors share a population. Where the
    filter cannot tell, the value is unscored, for the measure's own reason if it has one.
    """

    def filtered() -> Any:
        try:
            if is_excluded():
                raise Excluded
        except Unscored:
            measure()
            raise
        return measure()

    return filtered


def _require_answer(answer: Answer | None, *, unedited: bool = False) -> Answer | None:
    """The answer, or beside a failed edit the unedited model's; raises the reason of a missing one."""
    if isinstance(answer, FailedAnswer):
        if unedited and answer.unedited is not None:
            return answer.with_unedited()
        raise (Failed if answer.is_failure else Unscored)(answer.reason)
    return answer


def _of_kind(answer: Answer | None, kind: type[AnswerT], name: str, unedited: bool) -> AnswerT:
    """The answer of the edited or the unedited model, if it is of a kind; raises the reason of another or none."""
    answer = _require_answer(answer, unedited=unedited)
    if not isinstance(answer, kind):
        raise Unscored(f"the metric needs a {name}, but the answer is a {type(answer).__name__}")
    if not unedited:
        return answer
    if answer.unedited is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing="the unedited model's answers"))
    return answer.unedited


def scored_continuation(answer: Answer | None, *, unedited: bool = False) -> ScoredContinuation:
    """The log-likelihood answer of the edited or the unedited model.

    Raises Unscored if it is absent or not finite.
    """
    answer = _of_kind(answer, ScoredContinuation, "likelihood", unedited)
    if reason := why_no_answer(answer):
        raise Failed(reason)
    if not math.isfinite(answer.logprob):
        raise Failed(f"log-probability is {answer.logprob}")
    return answer


def generated_text(answer: Answer | None, *, unedited: bool = False) -> GeneratedText:
    """The generation of the edited or the unedited model; Unscored if absent, unfinished or not finite."""
    answer = _of_kind(answer, GeneratedText, "generation", unedited)
    if reason := why_no_answer(answer):
        raise (Unscored if unedited else Failed)(reason)
    return answer


def state_cosine(answer: Answer) -> float:
    """Cosine of the hidden states of edited and unedited model."""
    return _similarity(answer, "cosine", "hidden states", "zero or not finite")


def next_token_overlap(answer: Answer) -> float:
    """Overlap of the next-token distributions of edited and unedited model."""
    return _similarity(answer, "overlap", "distributions of the next token", "not finite")


def _similarity(answer: Answer, name: str, compared: str, fault: str) -> float:
    _require_answer(answer)
    value = getattr(answer, name) if isinstance(answer, StateSimilarity) else None
    if value is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing=compared))
    if not math.isfinite(value):
        raise Failed(f"the {compared} of the edited and the unedited model: one is {fault}")
    return float(value)


def nll(answer: Answer, *, unedited: bool = False) -> float:
    """Mean negative log-likelihood per target token, in nats."""
    scored = scored_continuation(answer, unedited=unedited)
    if scored.num_tokens is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing="token counts"))
    return scoring.mean_nll(scored.logprob, scored.num_tokens)


def prob(wanted: Answer, other: Answer, *, unedited: bool = False) -> float:
    """PROB: 1 if the wanted target is strictly more likely per token.

    A question without a competing target has that reason, also where the edit failed.
    """
    nll_other = nll(other, unedited=unedited)
    return scoring.prefers(nll(wanted, unedited=unedited), nll_other)


def prob_magnitude(wanted: Answer, other: Answer) -> float:
    """Difference of the per-token probabilities of the two targets; see :func:`prob` for its reasons."""
    nll_other = nll(other)
    return scoring.magnitude(nll(wanted), nll_other)


def tf_exact(answer: Answer, *, unedited: bool = False) -> float:
    """TF-EXACT: 1 if every teacher-forced argmax is the target's token."""
    return float(scored_continuation(answer, unedited=unedited).is_greedy)


def tf_match(answer: Answer, *, unedited: bool = False) -> float:
    """TF-MATCH: share of target tokens that are the teacher-forced argmax."""
    scored = scored_continuation(answer, unedited=unedited)
    if scored.token_argmax is None or scored.token_ids is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing="token ids"))
    return scoring.share_equal(scored.token_argmax, scored.token_ids)


def agree_tf(answer: Answer) -> float:
    """AGREE-TF: share of gold positions with the unedited model's argmax."""
    before = scored_continuation(answer, unedited=True).token_argmax
    after = scored_continuation(answer).token_argmax
    if before is None or after is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing="token ids"))
    if len(before) != len(after):
        raise Unscored(f"edited and unedited model saw {len(after)} and {len(before)} target tokens")
    return scoring.share_equal(after, before)


def agree_gen(answer: Answer | None) -> float:
    """AGREE-GEN: 1 if edited and unedited model generate the same token ids."""
    before, after = generated_text(answer, unedited=True), generated_text(answer)
    if before.token_ids is None or after.token_ids is None:
        raise Unscored(why_without_tokens(after))
    return scoring.all_equal(after.token_ids, before.token_ids)


def target_match(answer: Answer | None, *, unedited: bool = False) -> float:
    """Share of positions at which a generation of fixed length has the token of the gold answer.

    AR-MATCH of a free generation, TF-MATCH of a teacher-forced one.
    """
    generated = generated_text(answer, unedited=unedited)
    return _share_of_positions(generated.token_ids, generated.target_ids, "answer and gold answer")


def agree_ar(answer: Answer | None) -> float:
    """AGREE-AR: share of positions at which edited and unedited model generate the same token.

    Both generations have the gold answer's length.
    """
    before, after = generated_text(answer, unedited=True).token_ids, generated_text(answer).token_ids
    return _share_of_positions(after, before, "edited and unedited model's answer")


def _share_of_positions(left: Sequence[int] | None, right: Sequence[int] | None, noun: str) -> float:
    if left is None or right is None:
        raise Unscored(NEEDS_EDITED_HF.format(missing="token ids"))
    if len(left) != len(right):
        raise Unscored(f"{noun} have {len(left)} and {len(right)} tokens")
    return scoring.share_equal(left, right)


def both_empty(answer: Answer | None) -> float:
    """1 if neither model writes anything before the stop rule.

    Such pairs agree without showing locality.
    """
    texts = generated_text(answer, unedited=True).text, generated_text(answer).text
    return float(not any(text.strip() for text in texts))


def generated_match(answer: Answer | None, gold: str, *, unedited: bool = False) -> float:
    """EM: 1 if the generation, up to its natural stop, equals the gold answer after normalization, in any language."""
    return float(exact_match(generated_text(answer, unedited=unedited).text, gold))


def generated_squad_match(answer: Answer | None, gold: str) -> float:
    """EM as published: 1 if the generation equals the gold answer after SQuAD's normalization, which is for English."""
    return float(squad_match(generated_text(answer).text, gold))


def generated_contains(answer: Answer | None, gold: str) -> float:
    """1 if the generation contains the gold answer as whole words.

    Both are normalized, and the generation ends at its natural stop.
    """
    return float(alias_match(generated_text(answer).text, [gold]))


def goes_on(answer: Answer | None, gold: str) -> float:
    """1 if the generation begins with the gold answer and goes on before its natural stop (WILD, table 7)."""
    return float(bool(following_words(generated_text(answer).text, gold)))


def repeats(answer: Answer | None, gold: str) -> float:
    """1 if the gold answer, at the beginning of the generation, is followed by itself ("meaningless repetition")."""
    rest = following_words(generated_text(answer).text, gold)
    gold_words = words(gold)
    return float(bool(rest) and rest[: len(gold_words)] == gold_words)


def following_words(text: str, gold: str) -> list[str]:
    """The words after the gold answer in a text that begins with it, after normalization; else none."""
    found, wanted = words(text), words(gold)
    return found[len(wanted) :] if wanted and found[: len(wanted)] == wanted else []


def judged_correct(answer: Answer | None) -> float:
    """1 if a judge calls the answer correct."""
    _require_answer(answer)
    if not isinstance(answer, Verdict):
        raise Unscored(f"the metric needs a verdict, but the answer is a {type(answer).__name__}")
    if answer.label is None:
        raise Unscored(f"judge: {answer.unscored_reason}")
    return float(answer.label == CORRECT)
