"""Multi-hop questions about paths of a growing graph: which paths, validation, reasoning, hostile replies."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from graph_world import World, chain_question_of, parse_prompt, write_seeds
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Fault
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.chain_questions import NO_QUESTION, draw_paths, find_paths
from lm_edit.builders.knowgic.graph import MAX_STEPS, Edit
from lm_edit.builders.knowgic.growth import Grower, GrowthLimits
from lm_edit.builders.knowgic.growth_prompts import UnusableReply, chain_chat, parse_chain_question
from lm_edit.builders.knowgic.seeds import read_seeds
from lm_edit.builders.knowgic.validation import UNKNOWN

HOME = (Fact("Ada Moss", "house", "Larkhall"), Fact("Larkhall", "home", "Elmwood"))
TOWN = (*HOME, Fact("Elmwood", "town", "Fenn"))


def grow(folder: Path, world: Any, **limits: Any) -> Any:
    return Grower(read_seeds(write_seeds(folder)), world.ask, GrowthLimits(**limits)).grow()


PAIRS = [(start, end) for start in range(7) for end in range(7) if start != end]
FLAGS = st.lists(st.booleans(), min_size=len(PAIRS), max_size=len(PAIRS))


@given(present=FLAGS, new=FLAGS, subjects=st.sets(st.integers(0, 6), min_size=1))
def test_paths_are_those_of_a_search_over_all_orders(present: list[bool], new: list[bool], subjects: set[int]) -> None:
    facts = [Fact(f"e{a}", f"to {b}", f"e{b}") for (a, b), is_in in zip(PAIRS, present, strict=True) if is_in]
    links = {(fact.subject, fact.object): fact for fact in facts}
    new_facts = {fact for fact, is_new in zip(facts, new, strict=False) if is_new}
    entities = sorted({name for pair in links for name in pair})
    expected = set()
    for length in range(3, MAX_STEPS + 2):
        for order in permutations(entities, length):
            steps = list(pairwise(order))
            if order[0] in {f"e{n}" for n in subjects} and all(step in links for step in steps):
                path = tuple(links[step] for step in steps)
                if new_facts & set(path):
                    expected.add(path)
    edits = [Edit(Fact(f"e{n}", "r", "x"), "y") for n in sorted(subjects)] * 2  # two edits of a subject: no path twice
    found = find_paths(facts, edits, new_facts)
    assert len(found) == len(set(found)) and set(found) == expected


def test_the_draw_depends_on_the_seed_and_not_on_the_other_paths() -> None:
    paths = [(Fact("a", f"r{n}", f"b{n}"), Fact(f"b{n}", "s", "c")) for n in range(8)]
    whole = draw_paths(paths, 8, 0)
    assert set(whole) == set(paths) and draw_paths(list(reversed(paths)), 3, 0) == whole[:3]
    rest = [path for path in paths if path != whole[0]]
    assert draw_paths(rest, 2, 0) == whole[1:3] and draw_paths(paths, 0, 0) == []
    assert len({tuple(draw_paths(paths, 8, seed)) for seed in range(5)}) > 1


def test_reasoning_about_a_chain_brings_facts(tmp_path: Path) -> None:
    """The model names Fenn when asked over three facts; its reasoning holds a triplet no single question brings."""
    question = chain_question_of(TOWN)
    pupil = Fact("Larkhall", "pupil", "Bo Reed")
    world = World(
        {
            "question": lambda text: {question: "Fenn.", "What is the pupil of Larkhall?": "Bo Reed."}.get(text),
            "reasoning": lambda text: "Larkhall has the pupil Bo Reed." if text == question else None,
            "extraction": lambda text: json.dumps([pupil]) if text.startswith("Larkhall has") else None,
        }
    )
    growth = grow(tmp_path, world)
    (valid,) = (one for one in growth.chain_questions if not one.problem)
    assert (valid.path, valid.question, valid.response) == (TOWN, question, "Fenn.")
    (found,) = (one for one in growth.facts if one.fact == pupil)
    assert (found.round, found.candidate.sentence) == (3, "Larkhall has the pupil Bo Reed.")
    assert {one.problem for one in growth.chain_questions} == {"", UNKNOWN}
    reasoned = {texts for kind, texts in map(parse_prompt, world.prompts) if kind == "reasoning"}
    assert {one.question for one in growth.chain_questions} & reasoned == {question}  # those not known are left out
    assert pupil not in {one.fact for one in grow(tmp_path, world, chain_questions=0).facts}


@pytest.mark.parametrize("number", [0, 1, 3, 9])
def test_the_number_of_chains_is_that_of_a_round(number: int, tmp_path: Path) -> None:
    world = World()
    growth = grow(tmp_path, world, rounds=9, chain_questions=number, attempts=1)
    # Round 1 has no chain, round 2 one, round 3 four with its two facts; the fact of round 4 leads back to the start.
    assert growth.rounds == 4 and len(growth.chain_questions) == min(number, 1) + min(number, 4)
    paths = [one.path for one in growth.chain_questions]
    assert all(path[0].subject == "Ada Moss" and 2 <= len(path) <= MAX_STEPS for path in paths)
    asked = [texts[0] for kind, texts in map(parse_prompt, world.prompts) if kind == "chain"]
    assert sorted(asked) == sorted(set(paths))


def test_a_failed_question_is_shown_to_the_writer_and_another_one_is_asked(tmp_path: Path) -> None:
    def write(texts: Any) -> str:
        path, attempt = texts
        return ["no", '{"question": "Where is Ada Moss?"}', json.dumps({"question": chain_question_of(path)})][attempt]

    world = World({"chain": write, "question": lambda text: "Elmwood" if text == chain_question_of(HOME) else None})
    growth = grow(tmp_path, world, rounds=2)
    (asked,) = growth.chain_questions
    assert (asked.path, asked.problem) == (HOME, "")
    last = [prompt for prompt in world.prompts if parse_prompt(prompt)[0] == "chain"][-1]
    assert last.endswith(
        '"no question": the reply is not one JSON object with the text question\n'
        '"Where is Ada Moss?": the answer to it was another one\n'
    )
    growth = grow(tmp_path, World({"chain": lambda texts: "no"}), rounds=2)
    assert [(one.question, one.problem) for one in growth.chain_questions] == [("", NO_QUESTION)]


@pytest.mark.parametrize(
    ("reply", "parsed"),
    [
        ('Sure: {"question": "Which school is the home  of Ada Moss\' house?"} Done.', "Ada Moss' house?"),
        ('{"question": "Does Larkhall of Ada Moss have a home?", "note": 1}', "have a home?"),  # a step may be named
        ("Which school is it, Ada Moss?", "not one JSON object"),
        ('{"question": "Ada Moss?"} {"question": "Ada Moss?"}', "not one JSON object"),
        ('{"question": 3}', "not one JSON object"),
        ('{"question": "Which school, Ada Moss"}', "does not end with a question mark"),
        ('{"question": "Which school?"}', "does not occur exactly once"),
        ('{"question": "Ada Moss and Ada Moss?"}', "does not occur exactly once"),
        ('{"question": "Is it Elmwood, Ada Moss?"}', "the last object occurs"),
        ('{"question": "Is it Elm College, Ada Moss?"}', "the last object occurs"),
        ('{"question": "Which Elmwoodian is Ada Moss?"}', "the last object occurs"),
        ('{"question": "Ada Moss?<|im_end|>"}', "brackets or markup"),
        ('{"question": "' + "Ada Moss " * 99 + '?"}', "too long"),
        ('{"question": "Ada Moss\\ud800?"}', "brackets or markup"),
    ],
)
def test_a_question_is_parsed_or_refused(reply: str, parsed: str) -> None:
    result = parse_chain_question(reply, HOME, ["Elm College"])
    assert parsed in (result.problem if isinstance(result, UnusableReply) else result)
    assert isinstance(result, str) == parsed.endswith("?")


def test_names_enter_the_prompt_quoted() -> None:
    hostile = (Fact("Ada", 'likes"]]\n', "Bo"), Fact("Bo", "<|im_end|>", "Cy"))
    ((message),) = chain_chat(hostile, [UnusableReply("x\n<|im_end|>?", "why")])
    assert "<|im_end|>" not in message["content"]
    assert parse_prompt(message["content"]) == ("chain", (hostile, 1))


def test_a_lost_reply_ends_the_run_and_a_refused_one_does_not(tmp_path: Path) -> None:
    def world_with(fault: Fault) -> Any:
        def ask(chats: Any) -> list[Any]:
            kinds = [parse_prompt(chat[-1]["content"])[0] for chat in chats]
            return [fault if kind == "chain" else one for kind, one in zip(kinds, World().ask(chats), strict=True)]

        return ask

    seeds = read_seeds(write_seeds(tmp_path))
    with pytest.raises(EditingError, match="did not reply to 1 of 1 requests: HTTP 500"):
        Grower(seeds, world_with(Fault("HTTP 500", retryable=True)), GrowthLimits()).grow()
    growth = Grower(seeds, world_with(Fault("HTTP 400")), GrowthLimits()).grow()
    assert {one.problem for one in growth.chain_questions} == {"no response: HTTP 400"}
    assert len(growth.facts) == 7
