"""Reading replies: a verdict over a closed label set, and yes/no answers to judgment questions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from judges.match import normalize

UNPARSABLE = "the judge's reply holds no verdict"


EMPTY = "the judge's reply is empty"


CUT = "the judge's reply was cut before its verdict"


REFUSED = "the judge refused"


_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)


# What may stand around a label on its line: emphasis, quotes, brackets, one closing mark.
_WRAPPING = "*_`\"'()[]{}#> \t"


_CLOSING = ".:!,;)"


_PREFIX = re.compile(
    r"^(?:(?:the|my|final|so|therefore|thus)\s+)*(?:verdict|answer|grade|label|decision|judge?ment|option|choice)"
    r"\s*(?:is\s*:?|[:=\-])\s*",
    re.IGNORECASE,
)


class Parsed(NamedTuple):
    """A label, or the reason why there is none."""

    label: str | None = None
    reason: str | None = None


def read_verdict(reply: str, labels: Mapping[str, str], *, finish: str | None = None) -> Parsed:
    """The verdict in a judge's reply.

    A verdict is a line of its own that holds nothing but a label: its letter, its word, or both when they agree, with
    an optional "Verdict:" before it and emphasis, quotes or a closing mark around it. The last such line counts, since
    a judge that thinks aloud decides at the end. Everything else is no verdict: prose around a letter, two letters in
    a line, a letter with the other one's word, refusals.

    Args:
        reply: the full reply; a closed ``<think>`` block is left out.
        labels: letter -> label, such as ``{"A": "correct", "B": "incorrect"}``.
        finish: why the server stopped; a reply cut at its length counts only when it is one verdict line.
    """
    if finish == "content_filter":
        return Parsed(reason=REFUSED)
    text = _THOUGHTS.sub("", reply)
    if "<think>" in text:
        return Parsed(reason=CUT)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return Parsed(reason=EMPTY)
    if finish == "length" and len(lines) > 1:
        return Parsed(reason=CUT)
    found = [label for line in lines if (label := _label_of(line, labels)) is not None]
    return Parsed(label=found[-1]) if found else Parsed(reason=UNPARSABLE)


def _label_of(line: str, labels: Mapping[str, str]) -> str | None:
    bare = _bare(_PREFIX.sub("", _bare(line), count=1))
    lowered = {letter.lower(): label for letter, label in labels.items()}
    words = set(labels.values())
    if bare.lower() in lowered:
        return lowered[bare.lower()]
    if bare.lower() in words:
        return bare.lower()
    letter, mark, rest = re.match(r"(\w*)(\W*)(.*)", bare, re.DOTALL).groups()  # type: ignore[union-attr]  # matches all
    label = lowered.get(letter.lower())
    return label if label and mark.strip() and _bare(rest).lower() == label else None


def _bare(text: str) -> str:
    stripped = text.strip().strip(_WRAPPING)
    return stripped.rstrip(_CLOSING).strip(_WRAPPING)


_YES = {"yes", "yeah", "yep", "true", "correct", "right"}


_NO = {"no", "nope", "false", "incorrect", "wrong", "not"}


def read_yes_no(text: str) -> bool | None:
    """The answer to a judgment question; ``None`` when the text does not decide.

    The first word decides. It must be one of a closed set, and no word of the other side may stand in the same
    sentence ("yes or no", "yes, that is false").
    """
    sentence = re.split(r"[.!?\n]", text.strip(), maxsplit=1)[0]
    words = normalize(sentence).split()
    if not words or words[0] not in _YES | _NO:
        return None
    said, other = (True, _NO) if words[0] in _YES else (False, _YES)
    return None if other & set(words[1:]) else said
