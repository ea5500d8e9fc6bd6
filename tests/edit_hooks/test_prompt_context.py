"""Contexts of prompts, and the white space that chat templates put before an answer."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError

from edit_hooks import EditingError
from edit_hooks.prompt_context import BARE, Messages, PromptContext, answer_separator, chat_context, qa_context


def template(user: str, header: str, answer: str):
    """A chat template of one user turn, the assistant's header and, if given, an answer after that header."""

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        text = user.replace("Q", messages[0]["content"])
        if add_generation_prompt:
            return text + header
        if not answer:
            raise TemplateError("no answers")
        return text + answer.replace("A", messages[1]["content"])

    return render


@pytest.mark.parametrize(
    ("header", "answer", "separator"),
    [
        ("<model>\n", "<model>\nA", ""),
        ("[/INST]", "[/INST] A </s>", " "),
        ("[/INST]", "[/INST]A</s>", " "),  # the template glues, the model does not
        ("<|assistant|>", "<|assistant|>A<|end|>", ""),
        ("<|assistant|>", "<|assistant|> A<|end|>", " "),  # written by the template itself
        ("<|assistant|>", "<|assistant|>\nA", "\n"),
        ("ASSISTANT:", "ASSISTANT: A", " "),
        ("<model>\n<think>\n\n</think>\n\n", "<model>\nA", ""),
        ("<model><think></think>", "<model>A", ""),  # its answers do not begin with the header
        ("[/INST]", "", " "),  # a template without answers
    ],
)
def test_the_separator_is_that_of_the_template(header: str, answer: str, separator: str) -> None:
    render = template("<user>Q</user>", header, answer)
    assert answer_separator(render) == separator
    context = chat_context(render)
    assert context == PromptContext("<user>", f"</user>{header}", separator)
    assert context.wrap("Who?") + context.continuation(" me") == f"<user>Who?</user>{header}{separator}me"


def test_further_text_stands_inside_the_context() -> None:
    inside = PromptContext("<user>", "</user>\n", "").around("He said so. ", " ")
    assert inside == PromptContext("<user>He said so. ", "</user>\n", "")
    assert BARE.around("", "") == BARE and BARE.continuation("x") == " x"


def test_the_qa_context_is_the_instruction() -> None:
    context = qa_context()
    asked = context.wrap("Who?") + context.continuation("me")
    assert asked == "Please answer the question:\n\nQ: Who?\nA: me"


@pytest.mark.parametrize("user", ["nothing", "Q and Q"])
def test_a_template_that_does_not_show_the_message_once_is_refused(user: str) -> None:
    with pytest.raises(EditingError, match="exactly once is needed"):
        chat_context(template(user, ":", ""))


@pytest.mark.parametrize("value", ["chat", 3, {"before": 1}, {"befor": "x"}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(EditingError, match="context"):
        PromptContext.of(value)
