"""Parsers for replies: a judge model's verdict, and yes/no answers to judgment questions."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

from judges.thoughts import split_answer, without_special_tokens

UNPARSABLE_REPLY = "the judge's reply holds no verdict"
EMPTY_REPLY = "the judge's reply is empty"
LISTED_LABELS = "the judge's reply lists the labels and chooses none"
TRUNCATED_REPLY = "the judge's reply was cut before its verdict"
ONLY_THOUGHT = "the judge's reply ends with its thought"
NO_THINK_END = "the judge's reply has no think_end_token, so its thought has no end"
SEVERAL_TURNS = "the judge's reply goes on behind the end of its turn, with another verdict"
REFUSED_REPLY = "the judge refused"

MAX_JSON = 20_000  # characters of a reply in which JSON is read

# Characters allowed around a label on its line: emphasis, quotes, brackets, formulas, and one closing mark.
_WRAPPING = "*_`\"'()[]{}#>$\\ \t\u00ab\u00bb\u2018\u2019\u201c\u201d\u201e\u300c\u300d\u3010\u3011"
_CLOSING_MARKS = ".:!,;)\u3002"

_VERDICT_PREFIX = re.compile(
    r"^(?:(?:the|my|final|so|hence|therefore|thus),?\s+)*(?:"
    r"(?:verdict|answer|grade|label|decision|judge?ment|option|choice)\s*(?:is\s*:?|[:=\-\u2013\u2014])\s*"
    r"|(?:verdict|grade|label|option|choice)\s+)",
    re.IGNORECASE,
)
_LETTER_AND_WORD = re.compile(r"(?P<letter>\w*)(?P<separator>\W*)(?P<word>.*)", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox|text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_ANSWER_TAG = re.compile(r"</?(?:answer|final_answer|verdict|grade|label|decision|judge?ment|response)>", re.IGNORECASE)
_TURN_END = re.compile(r"<\|(?:im_end|eot_id|end|return|end_of_text|endoftext)\|>|</s>|<eos>|<end_of_turn>|<turn\|>")

_JSON_KEY = re.compile(r'[\s\[{]*"[^"]*"\s*:')  # begins a line of JSON, whose key may be a letter
_VERDICT_KEYS = {"verdict", "grade", "label", "decision", "judgment", "judgement", "answer", "option", "choice"}


class ParsedReply(NamedTuple):
    """A label, or the reason for having none."""

    label: str | None = None
    reason: str | None = None


def read_verdict(
    reply: str, labels: Mapping[str, str], *, finish: str | None = None, think_end: str | None = None
) -> ParsedReply:
    r"""Parse the verdict in a judge model's reply.

    A verdict is a line that holds only a label: its letter, its word, or both if they agree. A prefix such as
    "Verdict:", surrounding emphasis, quotes or a closing mark are allowed, as are ``\boxed{A}``, ``<answer>A</answer>``
    and tokens that end a turn. A JSON object with one verdict counts as such a line. The last one counts, because a
    judge that reasons in its reply decides at the end. Prose around a letter, two letters in a line, a letter with the
    other label's word and refusals are not verdicts. Neither is the last verdict line where it ends a list of all
    labels on adjacent lines in the order of the prompt: that is an echo of the prompt's end.

    Args:
        reply: the full reply; only what is behind its thought is read (:func:`judges.thoughts.split_answer`).
        labels: letter -> label, such as ``{"A": "correct", "B": "incorrect"}``.
        finish: the server's finish reason. A reply cut at the token limit (``"length"``) is parsed only if it has a
            single line and no thought.
        think_end: text that ends the thought of every reply.
    """
    if finish == "content_filter":
        return ParsedReply(reason=REFUSED_REPLY)
    text, is_behind_thought = split_answer(reply, think_end)
    if text is None:
        return ParsedReply(reason=NO_THINK_END if think_end and think_end not in reply else TRUNCATED_REPLY)
    lines = [line for line in text.splitlines() if line.strip()]
    if finish == "length" and (is_behind_thought or len(lines) > 1):
        return ParsedReply(reason=TRUNCATED_REPLY)
    if not lines:
        return ParsedReply(reason=ONLY_THOUGHT if is_behind_thought else EMPTY_REPLY)
    line_labels = _line_labels(text, labels)
    while line_labels and line_labels[-1] is None:
        line_labels.pop()
    if not line_labels:
        return ParsedReply(reason=UNPARSABLE_REPLY)
    if line_labels[-len(labels) :] == list(labels.values()):
        return ParsedReply(reason=LISTED_LABELS)
    turns = [turn for turn in _TURN_END.split(text) if without_special_tokens(turn)]
    if len(turns) > 1 and len(set(line_labels) - {None}) > 1:
        return ParsedReply(reason=SEVERAL_TURNS)
    return ParsedReply(label=line_labels[-1])


def _line_labels(text: str, labels: Mapping[str, str]) -> list[str | None]:
    """Return the label of each line that is not blank; a JSON object over several lines counts as one."""
    found: list[str | None] = []
    position = 0
    while position < len(text):
        end = text.find("\n", position) + 1 or len(text)
        value, json_end = _json_object(text, position)
        if value is not None:
            found.append(_parse_object(value, labels))
            end = json_end
        else:
            # Not the line alone: other line breaks of Unicode, such as U+2028, end one as well.
            lines = text[position:end].splitlines()
            found.extend(_parse_line(line, labels) for line in lines if line.strip())
        position = end
    return found


def _json_object(text: str, position: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object that fills the lines from a position on, and its end."""
    start = len(text) - len(text[position:].lstrip(" \t")) if len(text) <= MAX_JSON else len(text)
    if not text.startswith("{", start):
        return None, position
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # malformed, a key that occurs twice, nested too deep
        return None, position
    rest = without_special_tokens(text[end:].partition("\n")[0]).strip("` \t\r")
    return (None, position) if rest else (value, end)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _parse_object(value: Mapping[str, Any], labels: Mapping[str, str]) -> str | None:
    """Return the label that an object gives as its verdict; ``None`` without one, and for two different ones."""
    words = [(key.lower().replace(" ", "_").removeprefix("final_"), word) for key, word in value.items()]
    found = {_parse_line(word, labels) for key, word in words if key in _VERDICT_KEYS and isinstance(word, str)}
    found -= {None}
    return found.pop() if len(found) == 1 else None


def _parse_line(line: str, labels: Mapping[str, str]) -> str | None:
    """Return the label that a line consists of, or ``None``."""
    if _JSON_KEY.match(line):
        return None
    bare = without_special_tokens(unicodedata.normalize("NFKC", line))
    bare = _ANSWER_TAG.sub("", _BOX.sub(r"\1", _BOX.sub(r"\1", bare)))
    bare = _strip_wrapping(_VERDICT_PREFIX.sub("", _strip_wrapping(bare), count=1))
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
