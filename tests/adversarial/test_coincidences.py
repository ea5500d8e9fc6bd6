"""Coincidences that mistake one thing for another elsewhere: rows for tokens, a prompt's own token for padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lm_runs import SHORT

from edit_hooks import EditRequest
from edit_hooks.answers import GeneratedText
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.locate.moments.moment_documents import full_context

EDITORS = ["r_rome", "memit", "ft_m", "lora", "grace", "wise", "melo"]


def no_progress(_count: int) -> None: ...


def scored(subject: Subject, items: list[ScoreItem], delta: Any) -> list[Any]:
    return score(subject.model, [(item, delta) for item in items], Limits(), no_progress)


def written(subject: Subject, items: list[GenerateItem], delta: Any) -> list[GeneratedText]:
    return generate(subject.model, subject.tokenizer, [(item, delta) for item in items], Limits(), no_progress)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("editor", EDITORS)
def test_as_many_rows_as_tokens(editor: str, model_type: str) -> None:
    """A hook that guesses the batch's axis from the sizes misfires here (EasyEdit)."""
    subject = Subject(editor, model_type)
    delta, size = subject.deltas[0], 6
    prompt = subject.tokenizer(EDIT_REQUESTS[0].text)["input_ids"][:size]
    prompts = [(*prompt[:-1], prompt[-1] + row) for row in range(len(prompt))]
    items = [ScoreItem(ids, (7,)) for ids in prompts]
    together = scored(subject, items, delta)
    for item, answer in zip(items, together, strict=True):
        (alone,) = scored(subject, [item], delta)
        assert answer.logprob == pytest.approx(alone.logprob, abs=1e-4)
    questions = [GenerateItem(ids, (), SHORT["max_gen_toks"]) for ids in prompts]
    alone = [written(subject, [question], delta)[0].token_ids for question in questions]
    assert [answer.token_ids for answer in written(subject, questions, delta)] == alone


@pytest.mark.parametrize("editor", EDITORS)
def test_a_prompt_that_holds_the_padding_token(editor: str) -> None:
    """Padding is the end-of-text token of these models; lengths come from masks, not from counting ids."""
    subject = Subject(editor, "gpt2")
    tokenizer = subject.tokenizer
    pad = tokenizer.pad_token or tokenizer.eos_token
    within = EditRequest(
        prompt="The sign reads" + pad + " and {} is the capital of", subject="Port Elna", target_new="Peru"
    )
    assert tokenizer(within.text)["input_ids"].count(tokenizer.convert_tokens_to_ids(pad)) >= 1
    (alone,) = subject.edit([within])
    batch = subject.edit([EDIT_REQUESTS[0], within, EDIT_REQUESTS[1]])
    assert distance(batch[1], alone) < 1e-4
    item = ScoreItem(tuple(tokenizer(within.text)["input_ids"]), (7, 8))
    others = [ScoreItem(tuple(tokenizer(request.text)["input_ids"]), (7,)) for request in EDIT_REQUESTS]
    (expected,) = scored(subject, [item], alone)
    assert scored(subject, [*others, item], alone)[-1].logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize(("positions", "tokens"), [(131_072, 4096), (512, 512), (None, 4096)])
def test_documents_of_long_context_models_are_cut_as_in_the_releases(positions: int | None, tokens: int) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=positions))
    assert full_context(model) == tokens
