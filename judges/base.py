"""`Verdict`: what a judge says about one answer. A judge that cannot decide says why; it never guesses a label."""

from __future__ import annotations

from dataclasses import dataclass

CORRECT = "correct"
INCORRECT = "incorrect"
LABELS = (CORRECT, INCORRECT)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One judged answer: a label, or the reason why there is none.

    Args:
        label: one of :data:`LABELS`, or ``None`` when the answer stays unscored.
        unscored_reason: why there is no label; given exactly when ``label`` is ``None``.
        judge: who decided, with its version, for example a judge's name or a model id.
        prompt_hash: SHA-256 (hex) of the prompt the judge saw; ``None`` for judges without one.
        raw_reply: the judge's full reply; ``None`` for judges without one.

    Raises:
        ValueError: for a label outside the closed set, or a label and a reason at once, or neither.
    """

    label: str | None = None
    unscored_reason: str | None = None
    judge: str = ""
    prompt_hash: str | None = None
    raw_reply: str | None = None

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
