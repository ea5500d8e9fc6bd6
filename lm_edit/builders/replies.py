"""Texts that a language model writes for records: JSON values in its replies, and names or wordings fit for prompts."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from edit_hooks.utils.text.scripts import mention_of
from judges.backends.base import UNFINISHED_THOUGHT, Fault, Outcome

MAX_NAME = 100  # characters of a subject, relation or object
MAX_WORDING = 300  # characters of a question or statement
MAX_REPLY = 20_000  # characters of a reply that is parsed

_MARKUP = frozenset("<>[]{}|`")  # as in judges.prompt: characters of chat templates


class ReplyText(NamedTuple):
    """A reply's text; ``None`` with a reason for having none."""

    text: str | None
    reason: str = ""


def reply_text(outcome: Outcome) -> ReplyText:
    """The text of a complete reply. The reason for having none is the same for the same cause, to be counted."""
    if isinstance(outcome, Fault):
        return ReplyText(None, outcome.reason)
    if outcome.finish == "content_filter":
        return ReplyText(None, "the writer refused")
    if outcome.finish in ("length", UNFINISHED_THOUGHT):
        return ReplyText(None, "the reply was cut")
    return ReplyText(outcome.text)


def is_usable(text: str, longest: int = MAX_NAME) -> bool:
    """Whether a text can be part of questions: not empty, one line, of bounded length, without markup or controls."""
    return (
        0 < len(text) <= longest
        and text == " ".join(text.split())
        and _MARKUP.isdisjoint(text)
        and not any(unicodedata.category(character) in ("Cc", "Cs", "Co") for character in text)
    )


def template_of(text: str, name: str, slot: str = "{}") -> str | None:
    """A text with a slot for a name; ``None`` unless this occurs once, as whole words."""
    template, count = mention_of(name).subn(lambda found: slot, text)
    return template if count == 1 else None


def json_values(text: str, bracket: str) -> Iterator[Any]:
    """The JSON values of a text that begin with a bracket and are not inside of another one.

    A text that is huge has none, and nothing is read behind one that is nested too deeply.
    """
    decode: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
    position = text.find(bracket) if len(text) <= MAX_REPLY else -1
    while position >= 0:
        try:
            value, end = decode(text, position)
        except RecursionError:
            return
        except ValueError:  # malformed, or beyond the interpreter's limit on digits
            end = position + 1
        else:
            yield value
        position = text.find(bracket, end)
