"""The text around a prompt: none, a QA instruction, or a chat template; and the seam between prompt and target.

Edits are made in such a context (``edit_context=``), and questions are asked in one. Both sides join prompt and target
by :func:`continuation` and nothing else. The separator between them is given (``separator`` of a record or a run, or a
chat template), or it follows the scripts of the texts: one space in English, nothing in Chinese.

White space at the edges of a text is content if it has a line break or a tab, as in code, and so is the indentation of
a line. Other spaces there are formatting and are dropped: the separator takes their place.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jinja2 import TemplateError

from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.text.scripts import separator_between

SPACE = " "
AUTO = "auto"  # the separator that follows the scripts of the texts
# Names of separators, for options: an option cannot be empty everywhere.
SEPARATORS = {"space": SPACE, "empty": "", "newline": "\n"}
QUESTION_SLOT = "{question}"
# The instruction of the WILD protocol (The Mirage of Model Editing, ACL 2025), as in its released code.
QA_INSTRUCTION = "Please answer the question:\n\nQ: {question}\nA:"
EDIT_CONTEXTS = ("bare", "qa", "chat")
# The two lines of in-context editing (IKE): a fact, then the question.
NEW_FACT, QUESTION_PREFIX = "New Fact: ", "Prompt: "

Messages: TypeAlias = list[dict[str, str]]
# (messages, add_generation_prompt) -> text
ChatTemplate: TypeAlias = Callable[[Messages, bool], str]

_MARKER = "xQUESTIONx"  # survives templates that strip messages or change their first letter's neighbors
_ANSWER = "xANSWERx"


def continuation(prompt: str, target: str, separator: str | None = None) -> str:
    """A target as it continues a prompt; prompt and target are joined here and nowhere else.

    Args:
        separator: the white space between them; ``None``: by their scripts (:func:`separator_between`).
    """
    target = content_after(prompt + (separator or ""), target)
    return resolved_separator(prompt, target, separator) + target


def resolved_separator(prompt: str, target: str, separator: str | None = None) -> str:
    """The white space between a prompt and a target without formatting; see :func:`continuation`."""
    return separator_between(prompt, target) if separator is None else separator


def statement(prompt: str, target: str, separator: str | None = None) -> str:
    """Prompt and target as one text; see :func:`continuation`."""
    return prompt + continuation(prompt, target, separator)


def fact_line(prompt: str, target: str, separator: str | None = None) -> str:
    """The line that states a fact, with its line break."""
    return f"{NEW_FACT}{statement(prompt, target, separator)}\n"


def content_of(text: str) -> str:
    """A text without the formatting at its edges; empty if it has no other characters than white space.

    Formatting is one space at the start, and spaces at the end. Several spaces at the start are an indentation, which
    counts in a prompt; in a target :func:`content_after` decides.
    """
    if not text.strip():
        return ""
    start, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    if len(start) == 1 and _are_spaces(start):
        text = text[1:]
    return text.rstrip() if _are_spaces(end) else text


def content_after(before: str, target: str) -> str:
    """A target without formatting, given the text that it continues.

    Spaces at its start are the indentation of a line after a line break, and formatting after anything else.
    """
    target = content_of(target)
    start = target[: len(target) - len(target.lstrip())]
    begins_line = not _are_spaces(before[len(before.rstrip()) :])
    return target if begins_line or not _are_spaces(start) else target.lstrip()


def _are_spaces(text: str) -> bool:
    """Whether white space, or an empty text, has neither line breaks nor tabs."""
    return all(unicodedata.category(character) == "Zs" for character in text)


def read_separator(value: object, what: str = "separator") -> str | None:
    """The separator of a setting: a name, or the white space itself; ``None`` for :data:`AUTO`.

    Raises:
        EditingError: for anything else.
    """
    if value == AUTO:
        return None
    if isinstance(value, str) and value in SEPARATORS:
        return SEPARATORS[value]
    return require_separator(value, what, (AUTO, *SEPARATORS))


def separator_name(separator: str | None) -> str:
    """The inverse of :func:`read_separator`."""
    return AUTO if separator is None else next((n for n, text in SEPARATORS.items() if text == separator), separator)


def require_separator(value: object, what: str, names: Sequence[str] = ()) -> str:
    """Refuse anything but white space, or an empty text, between prompt and target.

    Raises:
        EditingError: with the accepted values.
    """
    if isinstance(value, str) and not value.strip():
        return value
    accepted = f"{', '.join(names)}, or the white space itself" if names else 'white space, or "" for none'
    hint = near_misses(str(value), names)
    raise EditingError(
        f"{what}={value!r} is not accepted.{hint} Accepted: {accepted}. Other text belongs to the prompt."
    )


@dataclass(frozen=True)
class PromptContext:
    """Text around the prompt of an edit.

    Attributes:
        before, after: the text, white space and control tokens included.
        separator: white space between ``after`` and the target; ``None``: that of the edit, by its record or scripts.
        strips: the context drops white space around its prompt, as many chat templates do; no part of a record.
    """

    before: str = ""
    after: str = ""
    separator: str | None = None
    strips: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, value: object) -> PromptContext:
        """Check a context, or the mapping of one in a record.

        Raises:
            EditingError: for anything else.
        """
        if isinstance(value, cls):
            return value
        known = ["before", "after", "separator"]
        if not isinstance(value, Mapping) or not all(
            isinstance(text, str) or (text is None and name == "separator") for name, text in value.items()
        ):
            raise EditingError(f"context {value!r} is not known; a mapping of {', '.join(known)} to texts is needed.")
        if unknown := set(value) - set(known):
            raise unknown_keys_error("field of a context", unknown, known)
        return cls(**value)

    def wrap(self, text: str) -> str:
        """Put a text into the context."""
        return self.before + text + self.after

    def around(self, before: str, after: str) -> PromptContext:
        """Put further text between the context and its prompt."""
        return PromptContext(self.before + before, after.rstrip() + self.after, self.separator)

    def to_dict(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "separator": self.separator}


BARE = PromptContext()


def qa_context() -> PromptContext:
    """The context of the QA instruction."""
    before, after = QA_INSTRUCTION.split(QUESTION_SLOT)
    return PromptContext(before, after)


def chat_context(template: ChatTemplate) -> PromptContext:
    """The context of a chat template with the prompt as the user's message.

    Raises:
        EditingError: the template does not show the message exactly once.
    """
    text = template([{"role": "user", "content": _MARKER}], True)
    parts = text.split(_MARKER)
    if len(parts) != 2:
        raise EditingError(
            f"the chat template shows the user's message {len(parts) - 1} times ({text[:200]!r}); exactly once is "
            "needed. Use edit_context=bare or edit_context=qa."
        )
    spaced = f"\n{_MARKER}\n"
    strips = spaced not in template([{"role": "user", "content": spaced}], True)
    return PromptContext(parts[0], parts[1], answer_separator(template), strips)


def answer_separator(template: ChatTemplate) -> str:
    """The white space between the assistant's header of a chat template and the answer.

    It is what the template itself writes before the text of an answer (Llama-2: a space). Where it writes none, or
    where its answers do not begin with the header (thinking models), one space follows plain text (``[/INST]``) and
    none follows white space or a control token (``<|assistant|>``).
    """
    question = {"role": "user", "content": _MARKER}
    header = template([question], True)
    if header[-1:].isspace():
        return ""
    try:
        answered = template([question, {"role": "assistant", "content": _ANSWER}], False)
    except (TemplateError, ValueError):  # a template without answers
        answered = ""
    if answered.startswith(header):
        written = answered[len(header) :].partition(_ANSWER)[0]
        if written and written.isspace():
            return written
    return "" if header.endswith(">") else SPACE
