"""The chats of an evaluation: the messages behind the prompts that the model's chat template made."""

from __future__ import annotations

from typing import NamedTuple

from edit_hooks.prompt_context import ChatTemplate, Messages


class Chat(NamedTuple):
    """The messages of a prompt, and whether the template opened the assistant's turn after them."""

    messages: Messages
    add_generation_prompt: bool


class Chats:
    """Formats chats and records them.

    Args:
        template: the model's chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._chats: dict[str, Chat] = {}

    def __bool__(self) -> bool:
        return bool(self._chats)

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._chats

    def __getitem__(self, prompt: str) -> Chat:
        return self._chats[prompt]

    def apply_template(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Format a chat and record its messages."""
        text = self.template(messages, add_generation_prompt)
        self._chats[text] = Chat([dict(message) for message in messages], add_generation_prompt)
        return text

    def forget(self) -> None:
        """Forget all chats; the next evaluation may ask the same prompts as plain ones."""
        self._chats.clear()

    def question_of(self, prompt: str) -> str:
        """The last user message of a chat; any other prompt unchanged."""
        if prompt not in self._chats:
            return prompt
        return next(message["content"] for message in reversed(self[prompt].messages) if message["role"] == "user")

    def last_turn(self, prompt: str) -> str:
        """The text of a chat after its last user message: header and beginning of the answer; empty if unknown.

        The beginning (``gen_prefix``) is found by itself, because it may repeat words of the question.
        """
        if prompt not in self._chats:
            return ""
        last, text = self[prompt].messages[-1], prompt.rstrip()
        begun = last["content"].strip() if last["role"] == "assistant" else ""
        question = self.question_of(prompt).strip()
        _, found, header = text.removesuffix(begun).rpartition(question) if question else ("", "", "")
        return (header if found else "") + begun
