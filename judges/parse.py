"""Parsers for replies: a judge model's verdict, and yes/no answers to judgment questions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from judges.match import normalize

UNPARSABLE_REPLY = "the judge's reply holds no verdict"
EMPTY_REPLY = "the judge's reply is empty"
LISTED_LABELS = "the judge's reply lists the labels and chooses none"
TRUNCATED_REPLY = "the judge's reply was cut before its verdict"
REFUSED_REPLY = "the judge refused"

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"

# Characters allowed around a label on its line: emphasis, quotes, brackets, and one closing mark.
_WRAPPING = "*_`\"'()[]{}#> \t"
_CLOSING_MARKS = ".:!,;)"

_VERDICT_PREFIX = re.compile(
    r"^(?:(?:the|my|final|so|therefore|thus)\s+)*(?:verdict|answer|grade|label|decision|judge?ment|option|choice)"
    r"\s*(?:is\s*:?|[:=\-])\s*",
    re.IGNORECASE,
)
_LETTER_AND_WORD = re.compile(r"(?P<letter>\w*)(?P<separator>\W*)(?P<word>.*)", re.DOTALL)

_YES_WORDS = {"yes", "yeah", "yep", "true", "correct", "right"}
_NO_WORDS = {"no", "nope", "false", "incorrect", "wrong", "not"}


class ParsedReply(NamedTuple):
    """A label, or the reason for having none."""

    label: str | None = None
    reason: str | None = None


def without_thoughts(reply: str) -> str | None:
    """Return a reply without its closed ``<think>`` blocks; ``None`` if one is open, so that nothing follows it."""
    parts, position = list[str](), 0
    while (start := reply.find(_THINK_OPEN, position)) >= 0:
        end = reply.find(_THINK_CLOSE, start)
        if end < 0:
            return None
        parts.append(reply[position:start])
        position = end + len(_THINK_CLOSE)
    text = "".join([*parts, reply[position:]])
    return None if _THINK_OPEN in text else text


def read_verdict(reply: str, labels: Mapping[str, str], *, finish: str | None = None) -> ParsedReply:
    """Parse the verdict in a judge model's reply.

    A verdict is a line that holds only a label: its letter, its word, or both if they agree. A prefix such as
    "Verdict:" and surrounding emphasis, quotes or a closing mark are allowed. The last such line counts, because a
    judge that reasons in its reply decides at the end. Prose around a letter, two letters in a line, a letter with the
    other label's word and refusals are not verdicts. Neither is the last verdict line where it ends a list of all
    labels on adjacent lines in the order of the prompt: that is an echo of the prompt's end.

    Args:
        reply: the full reply; closed ``<think>`` blocks are skipped.
        labels: letter -> label, such as ``{"A": "correct", "B": "incorrect"}``.
        finish: the server's finish reason. A reply cut at the token limit (``"length"``) is parsed only if it has a
            single line.
    """
    if finish == "content_filter":
        return ParsedReply(reason=REFUSED_REPLY)
    text = without_thoughts(reply)
    if text is None:
        return ParsedReply(reason=TRUNCATED_REPLY)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ParsedReply(reason=EMPTY_REPLY)
    if finish == "length" and len(lines) > 1:
        return ParsedReply(reason=TRUNCATED_REPLY)
    line_labels = [_parse_line(line, labels) for line in lines]
    while line_labels and line_labels[-1] is None:
        line_labels.pop()
    if not line_labels:
        return ParsedReply(reason=UNPARSABLE_REPLY)
    if line_labels[-len(labels) :] == list(labels.values()):
        return ParsedReply(reason=LISTED_LABELS)
    return ParsedReply(label=line_labels[-1])


def _parse_line(line: str, labels: Mapping[str, str]) -> str | None:
    """Return the label that a line consists of, or ``None``."""
    bare = _strip_wrapping(_VERDICT_PREFIX.sub("", _strip_wrapping(line), count=1))
    label_of_letter = {letter.lower(): label for letter, label in labels.items()}
    if bare.lower() in label_of_letter:
        return label_of_letter[bare.lower()]
    if bare.lower() in labels.values():
        return bare.lower()
    parts = _LETTER_AND_WORD.match(bare)
    assert parts is not None  # every group may be empty
    label = label_of_letter.get(parts["letter"].lower())
    agrees = _strip_wrapping(parts["word"]).lower() == label
    return label if label and parts["separator"].strip() and agrees else None


def _strip_wrapping(text: str) -> str:
    return text.strip().strip(_WRAPPING).rstrip(_CLOSING_MARKS).strip(_WRAPPING)


def read_yes_no(text: str) -> bool | None:
    """Parse the answer to a judgment question; ``None`` if it does not decide.

    The first word decides and must be one of a closed set. A word of the opposite set in the same sentence makes the
    answer undecided ("yes or no", "yes, that is false").
    """
    sentence = re.split(r"[.!?\n]", text.strip(), maxsplit=1)[0]
    words = normalize(sentence).split()
    if not words or words[0] not in _YES_WORDS | _NO_WORDS:
        return None
    is_yes = words[0] in _YES_WORDS
    opposite = _NO_WORDS if is_yes else _YES_WORDS
    return None if opposite & set(words[1:]) else is_yes
