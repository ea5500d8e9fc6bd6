"""The contexts of a run: the text in which edits are made, and the one in which questions are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ModelResult
from edit_hooks.modeling.tokens import require_chat_template
from edit_hooks.prompt_context import BARE, ChatTemplate, PromptContext, chat_context, qa_context
from edit_hooks.request import EditRequest


def edit_context_of(name: str, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> PromptContext:
    """The context that ``edit_context=`` names.

    Args:
        template: the model's chat template with its options.

    Raises:
        EditingError: ``chat`` for a tokenizer without a chat template.
    """
    if name == "chat":
        require_chat_template(tokenizer)
        return chat_context(template)
    return qa_context() if name == "qa" else BARE


def edited_text(request: EditRequest) -> str:
    """The text on which an edit is made, with its target."""
    return request.text + request.continuation


def with_edited_texts(answer: ModelResult, requests: Iterable[EditRequest]) -> ModelResult:
    """Add the texts of the case's edits to the report of an answer, if it has one."""
    if answer.edit is None:
        return answer
    texts = tuple(edited_text(request) for request in requests)
    return dataclasses.replace(answer, edit=dataclasses.replace(answer.edit, texts=texts))


class ContextExamples:
    """One rendered example of an edit and of a question, for result files."""

    def __init__(self) -> None:
        self._edit: str | None = None
        self._question: str | None = None
        self._question_context: str | None = None

    def record(self, request: Instance, edits: Iterable[EditRequest], in_chat: bool) -> None:
        """Keep the first question, and the first edit."""
        if self._question is None:
            prompt, argument = request.args
            self._question = prompt + argument if request.request_type == "loglikelihood" else prompt
            self._question_context = "chat" if in_chat else "task"
        if self._edit is None:
            self._edit = next(map(edited_text, edits), None)

    def to_json(self) -> dict[str, str | None]:
        """The examples and the context of questions, ``None`` without an edit or a question of an editing task.

        A question's context is ``chat`` if a chat template was applied, else ``task``: the prompt that the task writes.
        That of edits is an option (``edit_context``). Examples depend on the tasks of a run and identify nothing.
        """
        return {
            "edit_example": self._edit,
            "question_context": self._question_context,
            "question_example": self._question,
        }
