"""The content of a passport as typed values, and its JSON.

The schema is described in docs/reference/passport.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.readable import readable

SCHEMA = "lm-eval-editing passport 1.0"


@dataclass(frozen=True, kw_only=True)
@readable
class PassportScore:
    """One number of a passport.

    Attributes:
        name: of the column, as the task prints it, or of an analysis.
        task: the task that measured it, or "" for an analysis of the passport itself.
        value: ``None`` if nothing was scored; then :attr:`note` or :attr:`reasons` say why.
        low, high: ends of the 95% interval, if there is one.
        method: how the interval was made.
        n: scored cases, or prompts of an analysis.
        unscored: cases without a value; never part of the mean.
        reasons: why they have none -> number of cases.
        is_share: the value is a share in 0..1.
        chance: value of a guess, if the task declares one.
        before: the same number of the model that the part compares with (:attr:`Part.compared_with`), if it was asked.
        note: why there is no interval or no value.
    """

    name: str
    task: str = ""
    value: float | None
    low: float | None = None
    high: float | None = None
    method: str = ""
    n: int
    unscored: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    is_share: bool = False
    chance: float | None = None
    before: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not (self.note or self.reasons):
            raise EditingError(f"score {self.name!r} has no value and no reason; give one of them.")


@dataclass(frozen=True, kw_only=True)
@readable
class Part:
    """One part of a passport: its scores, or why it has none.

    Attributes:
        question: what it asks, for readers.
        unscored: why the part as a whole was not measured; "" if it was.
        compared_with: the model of :attr:`PassportScore.before`.
        details: settings and checks of its analyses (JSON-able).
    """

    name: str
    question: str
    scores: Sequence[PassportScore] = ()
    unscored: str = ""
    compared_with: Literal["unedited model", "edited model"] = "unedited model"
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
@readable
class Passport:
    """All parts, and what was measured on what.

    Attributes:
        edit: file name, editor, number of requests, their texts, checksum.
        model: name and identity.
        facts: where the questions come from, and how many facts were asked.
        settings: options and seeds of the run.
        versions: package -> version.
    """

    edit: Mapping[str, Any]
    model: Mapping[str, Any]
    facts: Mapping[str, Any]
    parts: Sequence[Part]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The passport as JSON-able values; numbers that are not finite are strings."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "seconds": round(self.seconds, 2),
            "edit": dict(self.edit),
            "model": dict(self.model),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "parts": [_part_json(part) for part in self.parts],
        }


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "question": part.question,
        "seconds": round(part.seconds, 2),
        "unscored": part.unscored or None,
        "compared_with": part.compared_with,
        "details": {
            name: _number(value) if isinstance(value, float) else value for name, value in part.details.items()
        },
        "scores": [_score_json(score) for score in part.scores],
    }


def _score_json(score: PassportScore) -> dict[str, Any]:
    interval = None if score.low is None else [score.low, score.high]
    return {
        "name": score.name,
        "task": score.task or None,
        "value": _number(score.value),
        "interval": interval,
        "interval_method": score.method or None,
        "n": score.n,
        "unscored": score.unscored,
        "unscored_reasons": dict(score.reasons),
        "is_share": score.is_share,
        "chance": score.chance,
        "before": _number(score.before),
        "note": score.note or None,
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
