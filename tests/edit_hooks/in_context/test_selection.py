"""Which facts are stated before a question."""

from __future__ import annotations

import dataclasses

import pytest

from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.selection import select_facts

CAPITAL = ContextEdit("Port Elna is the capital of", "Dravonia")
LAKE = ContextEdit("Lake Omber lies in", "Peru")
HARP = ContextEdit("Mina Okabe plays the", "harp")
FACTS = [CAPITAL, LAKE, HARP]


def with_settings(facts: list[ContextEdit], **settings) -> list[ContextEdit]:
    return [dataclasses.replace(fact, **settings) for fact in facts]


def test_the_most_similar_fact_is_selected():
    assert select_facts(FACTS, "In which country is Lake Omber?").prompt.facts == (LAKE,)
    assert select_facts(FACTS, "Which instrument does Mina Okabe play?").prompt.facts == (HARP,)


@pytest.mark.parametrize(
    "shown",
    [
        "Q: {0} A: Dravonia\nQ: {0} A: Dravonia\nQ: {1} A:",
        "Question: {0}\nThoughts: Port Elna is the capital of Dravonia.\nAnswer: Dravonia\n\nQuestion: {1}\nThoughts:",
    ],
)
def test_demonstrations_before_a_question_do_not_count(shown: str) -> None:
    prompt = shown.format("Port Elna is the capital of which country?", "Which instrument does Mina Okabe play?")
    assert select_facts(FACTS, prompt).prompt.facts == (HARP,)


def test_the_nearest_fact_and_its_similarity_are_known_whether_it_is_stated_or_not():
    stated, refused = (
        select_facts(with_settings(FACTS, min_similarity=limit), "In which country is Lake Omber?")
        for limit in (None, 0.99)
    )
    assert stated.prompt.facts == (LAKE,) and refused.prompt is None
    assert stated.best_fact == refused.best_fact == 1 and 0.3 < stated.similarity == refused.similarity < 0.99
    assert select_facts([CAPITAL], "Who wrote the opera?").best_fact is None, "nothing to choose"


def test_several_facts_end_with_the_most_similar_one():
    selected = select_facts(with_settings(FACTS, num_facts=2), "Mina Okabe plays in Port Elna.").prompt.facts
    assert [fact.target_new for fact in selected] == ["Dravonia", "harp"]


@pytest.mark.parametrize("num_facts", [3, 5])
def test_no_more_facts_than_are_stated_end_with_the_most_similar_one_too(num_facts):
    """Its demonstrations are those that are shown."""
    facts = [dataclasses.replace(fact, demonstrations=(fact.target_new,), num_facts=num_facts) for fact in FACTS]
    prompt = select_facts(facts, "In which country is Lake Omber?").prompt
    assert {fact.target_new for fact in prompt.facts} == {"Dravonia", "Peru", "harp"}
    assert prompt.facts[-1].target_new == "Peru" and prompt.demonstrations == ("Peru",)


def test_without_a_threshold_a_single_fact_needs_no_embedder():
    assert select_facts(with_settings([CAPITAL], embedder="not installed"), "Who wrote the opera?").prompt.facts


def test_facts_below_the_threshold_are_left_out():
    capital, lake = with_settings([CAPITAL, LAKE], min_similarity=0.3)
    assert select_facts([capital, lake], "In which country is Lake Omber?").prompt.facts == (lake,)
    assert select_facts([lake], "In which country is Lake Omber?").prompt.facts == (lake,)
    assert select_facts([capital, lake], "Who wrote the opera?").prompt is None
    assert select_facts([capital], "Who wrote the opera?").prompt is None
    two = with_settings([capital, lake], num_facts=2)
    assert select_facts(two, "Lake Omber lies in Peru").prompt.facts == (two[1],)
