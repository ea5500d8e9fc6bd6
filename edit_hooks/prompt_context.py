"""The text around a prompt: none, a QA instruction, or a chat template; and the seam between prompt and target.

Edits are made in such a context (``edit_context=``), and questions are asked in one. Both sides join prompt and target
by the same rule: one space after plain text, and none after a chat template that ends in white space or in a control
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from jinja2 import TemplateError

from edit_hooks.utils.errors import EditingError, unknown_keys_error

SPACE = " "
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


def fact_line(prompt: str, target: str) -> str:
    """The line that states a fact, with its line break."""
    return f"{NEW_FACT}{prompt} {target}\n"


@dataclass(frozen=True)
class PromptContext:
    """Text around the prompt of an edit.

    Attributes:
        before, after: the text, white space and control tokens included.
        separator: white space between ``after`` and the target, if any.
    """

    before: str = ""
    after: str = ""
    separator: str = SPACE

    @classmethod
    def of(cls, value: object) -> PromptContext:
        """Check a context, or the mapping of one in a record.

        Raises:
            EditingError: for anything else.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            raise EditingError(f"context {value!r} is not known; a mapping of {', '.join(known)} to texts is needed.")
        if unknown := set(value) - set(known):
            raise unknown_keys_error("field of a context", unknown, known)
        return cls(**value)

    def wrap(self, text: str) -> str:
        """Put a text into the context."""
        return self.before + text + self.after

    def continuation(self, target: str) -> str:
        """A target as it continues a text in the context; prompt and target are joined here and nowhere else."""
        return self.separator + target.lstrip()

    def around(self, before: str, after: str) -> PromptContext:
        """Put further text between the context and its prompt."""
        return PromptContext(self.before + before, after.rstrip() + self.after, self.separator)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    return PromptContext(parts[0], parts[1], answer_separator(template))


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
