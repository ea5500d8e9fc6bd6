"""Contexts of prompts, and the white space that chat templates put before an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from edit_hooks import EditingError
from edit_hooks.prompt_context import (
    BARE,
    Messages,
    PromptContext,
    answer_separator,
    chat_context,
    content_after,
    content_of,
    continuation,
    fact_line,
    qa_context,
    read_separator,
    separator_name,
    statement,
)
from edit_hooks.request import EditRequest


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
    request = EditRequest(prompt="Who?", target_new=" me", context=context)
    assert request.text + request.continuation == f"<user>Who?</user>{header}{separator}me"


def test_further_text_stands_inside_the_context() -> None:
    inside = PromptContext("<user>", "</user>\n", "").around("He said so. ", " ")
    assert inside == PromptContext("<user>He said so. ", "</user>\n", "")
    assert BARE.around("", "") == BARE


def test_the_qa_context_is_the_instruction() -> None:
    request = EditRequest(prompt="Who?", target_new="me").in_context(qa_context())
    assert request.text + request.continuation == "Please answer the question:\n\nQ: Who?\nA: me"
    assert request.context is not None and request.context.separator == " "


@pytest.mark.parametrize("user", ["nothing", "Q and Q"])
def test_a_template_that_does_not_show_the_message_once_is_refused(user: str) -> None:
    with pytest.raises(EditingError, match="exactly once is needed"):
        chat_context(template(user, ":", ""))


@pytest.mark.parametrize("value", ["chat", 3, {"before": 1}, {"befor": "x"}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(EditingError, match="context"):
        PromptContext.of(value)


@pytest.mark.parametrize(
    ("prompt", "target", "separator", "text"),
    [
        ("The capital of France is", "Rome", None, "The capital of France is Rome"),
        ("The capital of France is", " Rome", None, "The capital of France is Rome"),
        ("法国的首都是", "罗马", None, "法国的首都是罗马"),
        ("法国的首都是", " 罗马", None, "法国的首都是罗马"),
        ("法国的首都是", "罗马", " ", "法国的首都是 罗马"),
        ("velib.", "open_frame", "", "velib.open_frame"),
        ("x = 1", "# one", "  ", "x = 1  # one"),
        ("def area(r):\n", "    return r", None, "def area(r):\n    return r"),
        ("def area(r):\n    ", "return r", None, "def area(r):\n    return r"),
        ("def area(r):", "\n    return r\n", None, "def area(r):\n    return r\n"),
        ("def area(r):", "    return r", "\n", "def area(r):\n    return r"),
        ("one:", "   two", None, "one: two"),  # spaces alone are no indentation where no line begins
    ],
)
def test_prompt_and_target_are_one_text(prompt: str, target: str, separator: str | None, text: str) -> None:
    assert statement(prompt, target, separator) == text
    request = EditRequest(prompt=prompt, target_new=target, separator=separator)
    assert request.text + request.continuation == text
    assert fact_line(prompt, target, separator) == f"New Fact: {text}\n"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (" Rome ", "Rome"),
        ("Rome   ", "Rome"),
        ("\u3000罗马", "罗马"),
        ("    return", "    return"),  # an indentation
        ("\tx", "\tx"),
        ("x\n", "x\n"),
        ("x \r\n", "x \r\n"),
        (" \n ", ""),
        ("", ""),
    ],
)
def test_spaces_at_the_edges_are_formatting_and_line_breaks_are_not(text: str, content: str) -> None:
    assert content_of(text) == content
    assert content_of(content) == content


@given(before=st.text(" a\n\t", max_size=4), target=st.text(" a\n\t", max_size=5))
def test_formatting_is_dropped_once(before: str, target: str) -> None:
    once = content_after(before, target)
    assert content_after(before, once) == once
    assert target.strip() == once.strip() and once in target
    assert continuation(before, target, "") == once


@pytest.mark.parametrize(
    ("value", "separator"),
    [("auto", None), ("space", " "), ("empty", ""), ("", ""), ("\u3000", "\u3000"), ("newline", "\n")],
)
def test_separators_have_names(value: str, separator: str | None) -> None:
    assert read_separator(value) == separator
    assert read_separator(separator_name(separator)) == separator


@pytest.mark.parametrize("value", [None, 3, "x", "emtpy", True])
def test_other_separators_are_refused(value: object) -> None:
    with pytest.raises(EditingError, match=r"separator=.*auto, space, empty, newline"):
        read_separator(value)
    if value is not None:
        with pytest.raises(EditingError, match=r"'separator' of case 7=.*white space"):
            EditRequest(prompt="a", target_new="b", case_id="7", separator=value)  # type: ignore[arg-type]


def test_a_chat_template_that_drops_white_space_refuses_a_prompt_that_needs_it() -> None:
    """Questions would show another text than the edit; white space inside of a prompt stays."""

    def strips(messages: Messages, add_generation_prompt: bool) -> str:
        return f"<user>{messages[0]['content'].strip()}</user><model>\n"

    block = EditRequest(prompt="def area(r):\n", target_new="    return r", case_id="4")
    with pytest.raises(EditingError, match=r"drops the white space around.*of case 4.*edit_context=bare"):
        block.in_context(chat_context(strips))
    kept = chat_context(template("<user>Q</user>", "<model>\n", "<model>\nA"))
    assert block.in_context(kept).text == "<user>def area(r):\n</user><model>\n"
    plain = EditRequest(prompt="Who\nis it?", target_new="me")
    assert plain.in_context(chat_context(strips)).to_dict()["context"] == {
        "before": "<user>",
        "after": "</user><model>\n",
        "separator": "",
    }
