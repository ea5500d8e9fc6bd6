"""Sequential prompting: a question of a chain after the earlier ones and their answers."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedLM
from task_runs import build, metrics_of, run

from edit_hooks.utils.errors import EditingError


def chain_prompts(**settings: Any) -> list[list[str]]:
    return [
        [doc["probes"][number]["prompt"] for number, _ in chain]
        for doc in build("knowgic_prob", knowgic_context="question_only", **settings).test_docs()
        for chain in doc["chains"]
    ]


def test_a_question_stands_after_the_earlier_ones_and_their_right_answers() -> None:
    alone, together = chain_prompts(), chain_prompts(knowgic_prompting="sequential")
    answers = [[answer for _, answer in chain] for doc in build("knowgic_prob").test_docs() for chain in doc["chains"]]
    assert max(map(len, alone)) > 1
    for questions, prompts, own in zip(alone, together, answers, strict=True):
        turns = [f"{question} {answer}" for question, answer in zip(questions, own, strict=True)]
        assert prompts == ["\n\n".join([*turns[:step], question]) for step, question in enumerate(questions)]


def test_the_broader_context_is_asked_alone() -> None:
    docs = build("knowgic_prob", knowgic_prompting="sequential").test_docs()
    prompts = [doc["probes"][number]["prompt"] for doc in docs for number, _ in doc["context"]]
    assert prompts and all(prompt.count("Q:") == 1 for prompt in prompts)


def test_a_model_that_forgets_in_the_conversation_only() -> None:
    """The edited model answers single questions as before, and later turns of a conversation e times less likely."""

    def likelihood(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        num_tokens = len(continuation.split())
        return -num_tokens * (1.0 if unedited or context.count("Q:") < 2 else 2.0), list(range(num_tokens))

    alone = metrics_of(run("knowgic_prob", ScriptedLM(likelihood)), "knowgic_prob")
    settings = {"knowgic_prompting": "sequential"}
    together = metrics_of(run("knowgic_prob", ScriptedLM(likelihood), settings), "knowgic_prob")
    assert alone["ifr_prob"] == alone["ifr_2_prob"] == together["ifr_1_prob"] == together["ckp_prob"] == 1.0
    assert together["ifr_2_prob"] == pytest.approx(0.36787944) and together["ifr_3_prob"] == pytest.approx(0.13533528)


def test_other_values_are_refused() -> None:
    with pytest.raises(EditingError, match="knowgic_prompting"):
        build("knowgic_prob", knowgic_prompting="together")
