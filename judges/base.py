"""`Item` goes in, `Verdict` comes out. A judge that cannot decide says why; it never guesses a label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from edit_hooks.utils.errors import EditingError

CORRECT = "correct"


INCORRECT = "incorrect"


LABELS = (CORRECT, INCORRECT)


class Item(NamedTuple):
    """What is judged: the bare question, the gold answer, the given answer, and further accepted answers."""

    question: str
    gold: str
    answer: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One judged answer: a label, or the reason why there is none.

    Args:
        label: one of :data:`LABELS`, or ``None`` when the answer stays unscored.
        unscored_reason: why there is no label; given exactly when ``label`` is ``None``.
        judge: who decided, with its version, for example a judge's name or a model id.
        prompt_hash: SHA-256 (hex) of the prompt the judge saw; ``None`` for judges without one.
        raw_reply: the judge's full reply; ``None`` for judges without one.
        answer: the text that was judged.

    Raises:
        ValueError: for a label outside the closed set, or a label and a reason at once, or neither.
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
                f"verdict label {self.label!r} is not one of {', '.join(LABELS)}; "
                "a reply that fits neither is Verdict(unscored_reason=...)."
            )
        if (self.label is None) == (not self.unscored_reason):
            raise ValueError(
                f"a verdict has either a label or an unscored_reason, got {self.label!r} and {self.unscored_reason!r}."
            )

    def __str__(self) -> str:
        return self.label or f"[unscored: {self.unscored_reason}]"


class CoverageError(EditingError):
    """Too few answers have a verdict for the numbers to mean anything."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What judging cost and how much of it worked.

    Args:
        judge: who judged.
        num_items: answers given to the judge, repeated ones included.
        num_scored: answers with a label.
        num_distinct: different answers among them.
        num_stored: distinct answers whose reply was in the store already.
        num_calls: requests sent, repeated attempts included.
        prompt_tokens, reply_tokens: as the server counted them for the replies of this run.
        reasons: why answers are unscored -> how many.
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

    @property
    def coverage(self) -> float:
        """Share of the answers that have a label; 1 when there was nothing to judge."""
        return self.num_scored / self.num_items if self.num_items else 1.0

    def __str__(self) -> str:
        text = f"judge {self.judge}: {self.num_scored} of {self.num_items} answers scored ({self.coverage:.1%})"
        if self.num_distinct:
            text += (
                f"; {self.num_distinct} distinct, {self.num_stored} from the store, {self.num_calls} calls, "
                f"{self.prompt_tokens} + {self.reply_tokens} tokens"
            )
        return text + ("; unscored: " + self._reasons() if self.reasons else "")

    def require(self, min_coverage: float) -> None:
        """Raise CoverageError when less than ``min_coverage`` (0..1) of the answers have a label."""
        if self.coverage < min_coverage:
            raise CoverageError(
                f"judge {self.judge} scored {self.num_scored} of {self.num_items} answers ({self.coverage:.1%}), "
                f"less than min_coverage={min_coverage:.0%}. Reasons: {self._reasons()}. Every reply that came is in "
                "the store: the next run asks only for what is missing."
            )

    def _reasons(self) -> str:
        return ", ".join(f"{reason} ({count})" for reason, count in self.reasons.items())


class Judged(NamedTuple):
    """Verdicts in the order of the items, and the report."""

    verdicts: list[Verdict]
    report: Report


class Judge(Protocol):
    """Anything that turns items into verdicts."""

    name: str

    def judge(self, items: Sequence[Item]) -> Judged:
        """One verdict per item, in order."""


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Unscored reason -> number of verdicts, most frequent first."""
    reasons = Counter(verdict.unscored_reason for verdict in verdicts if verdict.unscored_reason)
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
