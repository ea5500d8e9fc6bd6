"""SCR against its release: the filled prompts, and the fact that is read from each reply of the selecting model."""

from __future__ import annotations

from typing import Any

import pytest
from golden_data import golden_json

from edit_hooks import EditRequest, load_editor
from edit_hooks.in_context.fact_choice import answer_prompt, choice_prompt, read_choice

RUN: dict[str, Any] = golden_json("scr/selection")
QUESTION = "What is the capital of France?"
REQUESTS = [
    EditRequest(prompt="The capital of {} is", subject="France", target_new="Vienna"),
    EditRequest(prompt="{} plays the", subject="Toko Yasuda", target_new="trumpet."),
]


@pytest.fixture
def facts(golden_model):
    model, tokenizer = golden_model("tiny-gpt2")
    return load_editor("scr", {"embedder": "words"}).edit(model, tokenizer, REQUESTS, joint=True)[0].contexts


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_are_those_of_the_release(facts, count):
    assert (
        choice_prompt(facts[:count], f"Please answer the question:\n\nQ: {QUESTION}\nA:") == RUN["prompts"][count - 1]
    )
    assert answer_prompt("The capital of France is Vienna.", QUESTION) == RUN["answer"]


@pytest.mark.parametrize("case", RUN["replies"], ids=lambda case: case["reply"][:40])
def test_replies_are_read_as_in_the_release(facts, case):
    """Of one candidate, any choice is that candidate."""
    assert read_choice(case["reply"], facts, "released") == case["selected"]
    only = None if case["selected"] is None else "The capital of France is Vienna."
    assert read_choice(case["reply"], facts[:1], "released") == only
