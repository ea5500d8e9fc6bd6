"""The text of contexts, and their names in saved edits."""

from __future__ import annotations

import json

import pytest

from edit_hooks.deltas.context_edit import ContextEdit, ContextPrompt, MemoryModels, format_demonstration
from edit_hooks.prompt_context import fact_line

FACT = ContextEdit("Port Elna is the capital of", "Dravonia", demonstrations=("one", "two", "three"))


def test_the_format_is_that_of_ike():
    assert fact_line("a", "b") == "New Fact: a b\n"
    assert format_demonstration(fact_line("a", "b"), "c", "d") == "New Fact: a b\nPrompt: c d"


def test_demonstrations_come_before_the_fact_and_the_question():
    fact = "New Fact: Port Elna is the capital of Dravonia\n"
    assert FACT.before("Which country?") == FACT.before() == f"one\n\ntwo\n\nthree\n\n{fact}Prompt: "
    prompt = ContextPrompt((ContextEdit("x", "y", demonstrations=("other",)), FACT))
    assert prompt.text(1) == f"three\n\nNew Fact: x y\n{fact}Prompt: "
    assert prompt.text(0) == f"New Fact: x y\n{fact}Prompt: "
    hidden = ContextEdit("x", "y", demonstrations=("one",), include_fact=False)
    assert hidden.before() == "one\n\nPrompt: "


def test_a_question_with_a_fact_of_its_own_follows_the_demonstrations():
    question = "New Fact: The capital of Dravonia is Port Elna\nPrompt: The capital of Dravonia is"
    assert FACT.before(question) + question == f"one\n\ntwo\n\nthree\n\n{question}"
    prompt = ContextPrompt((FACT,))
    assert (prompt.num_facts(question), prompt.num_facts("Which country?")) == (0, 1)


@pytest.mark.parametrize("memory", [None, MemoryModels("folder", "digest")])
def test_a_round_trip_through_json(memory: MemoryModels | None) -> None:
    context = ContextEdit("a", "b", ("c",), include_fact=False, min_similarity=0.5, rounds=3, memory=memory)
    assert ContextEdit.from_dict(json.loads(json.dumps(context.to_dict()))) == context
