"""Thoughts in replies, and the answer behind them."""

from __future__ import annotations

import pytest

from judges.thoughts import is_marker, opened_thought, split_answer, without_special_tokens


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("plain", "plain"),
        ("<think>a</think>b<think>\n</think> c", " c"),
        ("</think> b", " b"),
        ("a</THINK>b", "b"),
        ("a <think> b", None),
        ("<thi<think></think>nk> b", "nk> b"),
        ("<thinking>a</thinking>b", "b"),
        ("<reasoning>a</reasoning>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("[THINK]a", None),
        ("<|START_THINKING|>a<|END_THINKING|>b", "b"),
        ("\u25c1think\u25b7a\u25c1/think\u25b7b", "b"),
        ("<|channel>thought\na<channel|>b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        ("<|channel|>final <|constrain|>json<|message|>b", "b"),
        ("<|channel|>final <|unknown|><|message|>b", None),
        ("<|channel|>analysis<|message|>a<|end|>", None),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", None),
        ("analysisWe see.assistantfinalb", "b"),
        ("analysisWe see.", None),
        ("analysis of the answer", "analysis of the answer"),
        ("Here is my thought process:\na\nHere is my response:\nb", "\nb"),
        ("Here is my thought process:\na", None),
        ("b. Here is my response:", "b. Here is my response:"),
        ("<think>" * 200_000, None),  # in linear time
        ("<|channel|>" * 100_000, None),
    ],
)
def test_the_answer_is_behind_the_last_thought(reply: str, text: str | None) -> None:
    answer = split_answer(reply)
    assert answer.text == text and answer.is_behind_thought == (text != reply)


def test_a_given_end_of_thoughts_is_required() -> None:
    assert split_answer("a[end]b[end]c", "[end]") == ("c", True)
    assert split_answer("a", "[end]") == (None, True)
    assert split_answer("a[end]<think>c", "[end]") == (None, True)


@pytest.mark.parametrize(
    ("prompt", "marker"),
    [
        ("user<think>\n", "<think>"),
        ("user[THINK]", "[THINK]"),
        ("user<|channel>thought\n", "<|channel>thought"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        ("user<think>\n\n</think>\n\n", ""),
        ("<think> assistant", ""),
        ("", ""),
    ],
)
def test_a_prompt_may_open_the_thought(prompt: str, marker: str) -> None:
    assert opened_thought(prompt) == marker
    assert split_answer(f"{marker}B").text == (None if marker else "B")


def test_tokens_of_a_turn_are_no_part_of_a_text() -> None:
    assert without_special_tokens("<|im_start|> a b <|im_end|>\n</s>") == "a b"
    assert without_special_tokens("a <|im_end|> b") == "a <|im_end|> b"
    assert without_special_tokens("</s>") == "" == without_special_tokens("")
    assert is_marker("[/THINK]") and is_marker("<|channel|>") and is_marker("</think>") and not is_marker("<|im_end|>")
