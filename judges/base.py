"""The interface of all judges: `Item` in, `Verdict` out.

A judge that cannot decide returns an unscored verdict with a reason; it never guesses a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import printable
from edit_hooks.utils.text.readable import readable

CORRECT = "correct"
INCORRECT = "incorrect"
LABELS = (CORRECT, INCORRECT)
MAX_EXAMPLE = 160  # characters of a reply in a message


@readable
class Item(NamedTuple):
    """An answer to judge.

    Args:
        question: the bare question, without few-shot examples or a chat template.
        gold: the expected answer.
        answer: the answer to judge.
        aliases: further accepted answers; string judges use them, model judges do not.
    """

    question: str
    gold: str
    answer: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
@readable
class Verdict:
    """The judgment of one answer: a label, or the reason for having none.

    Args:
        label: one of :data:`LABELS`, or ``None`` if the answer is unscored.
        unscored_reason: why there is no label; set exactly when ``label`` is ``None``.
        judge: name of the judge, with the version of its prompt.
        prompt_hash: SHA-256 (hex) of the judge's prompt; ``None`` for judges without a prompt.
        raw_reply: the judge model's full reply; ``None`` for judges without a model.
        answer: the judged text.

    Raises:
        ValueError: if the label is unknown, or if both or neither of label and reason are set.
    """

    label: str | None = None
    unscored_reason: str | None = None
    judge: str = ""
    prompt_hash: str | None = None
    raw_reply: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.label is not None and self.label not in LABELS:
            raise ValueError(
                f"verdict label {self.label!r} is unknown. Accepted: {', '.join(LABELS)}; use unscored_reason for an "
                "answer without a label."
            )
        if (self.label is None) == (not self.unscored_reason):
            raise ValueError(
                f"a verdict needs a label or an unscored_reason, got label={self.label!r} and "
                f"unscored_reason={self.unscored_reason!r}."
            )

    def __str__(self) -> str:
        return self.label or f"[unscored: {self.unscored_reason}]"


class CoverageError(EditingError):
    """Too few answers have a verdict for a meaningful score."""


@dataclass(frozen=True, kw_only=True)
@readable
class Report:
    """Coverage and cost of one call of a judge.

    Args:
        judge: name of the judge.
        num_items: judged answers, duplicates included.
        num_scored: answers with a label.
        num_distinct: distinct answers.
        num_stored: distinct answers whose reply was in the verdict store.
        num_calls: requests sent, retries included.
        prompt_tokens, reply_tokens: token counts of the new replies: those that the server reported, or estimates.
        reasons: unscored reason -> number of answers.
        num_unreadable: answers with a reply that holds no verdict.
        unreadable_reply: the first such reply.
        is_stored: whether replies are in a store that the next run reads.
    """

    judge: str
    num_items: int
    num_scored: int
    num_distinct: int = 0
    num_stored: int = 0
    num_calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    num_unreadable: int = 0
    unreadable_reply: str | None = None
    is_stored: bool = True

    @property
    def coverage(self) -> float:
        """Share of answers with a label; 1 if there are no answers."""
        return self.num_scored / self.num_items if self.num_items else 1.0

    def __str__(self) -> str:
        text = f"judge {self.judge}: {self.num_scored} of {self.num_items} answers scored ({self.coverage:.1%})"
        if self.num_distinct:
            text += (
                f"; {self.num_distinct} distinct, {self.num_stored} from the store, {self.num_calls} calls, "
                f"{self.prompt_tokens} + {self.reply_tokens} tokens"
            )
        return text + ("; unscored: " + self._format_reasons() if self.reasons else "")

    def require(self, min_coverage: float, *, part: str = "") -> None:
        """Raise CoverageError if less than ``min_coverage`` (0..1) of the answers have a label.

        Args:
            part: for the message, which answers these are where they are not all, as in `` of process 2 of 8``.
        """
        if self.coverage < min_coverage:
            raise CoverageError(
                f"judge {self.judge} scored {self.num_scored} of {self.num_items} answers{part} ({self.coverage:.1%}), "
                f"less than min_coverage={min_coverage:.0%}. Reasons: {self._format_reasons()}. {self._remedies()}"
            )

    def _remedies(self) -> str:
        """What to do about replies without a verdict, and what the next run requests."""
        sentences = []
        if self.num_unreadable:
            sentences.append(f"A reply without a verdict: {printable(repr(self.unreadable_reply), MAX_EXAMPLE)}.")
            if self.is_stored:
                sentences.append("Such replies are in the verdict store and are not requested again.")
            # Without a store all are requested again in any case.
            repaired = "after a repair of the server, request them again with ask_again=unscored (--ask-again unscored)"
            again = f"; {repaired}; " if self.is_stored else ", "
            sentences.append(
                f"Use a larger max_reply_tokens, another prompt or another model{again}or lower min_coverage."
            )
        if self.num_scored + self.num_unreadable < self.num_items or not self.is_stored:
            sentences.append(what_is_kept(self.is_stored, "verdict store"))
        return " ".join(sentences)

    def _format_reasons(self) -> str:
        return ", ".join(f"{reason} ({count})" for reason, count in self.reasons.items())


def what_is_kept(is_stored: bool, store: str) -> str:
    """A sentence about what the next run has to pay for, after one with too few replies."""
    if is_stored:
        return f"All replies received so far are in the {store}; the next run requests only the missing ones."
    return f"The {store} is off or cannot be written, so no reply is kept; the next run requests all of them again."


@readable
class Judgment(NamedTuple):
    """Verdicts in the order of the items, and the report."""

    verdicts: list[Verdict]
    report: Report


class Judge(Protocol):
    """Turns items into verdicts."""

    name: str

    def judge(self, items: Sequence[Item]) -> Judgment:
        """Return one verdict per item, in order."""


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Count verdicts by unscored reason, most frequent first."""
    reasons = Counter(verdict.unscored_reason for verdict in verdicts if verdict.unscored_reason)
    return dict(sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0])))
