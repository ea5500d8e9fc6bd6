"""Answers of a model whose logits stop being finite: none, at whatever token that happens and however it is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
import torch
from inference_cases import edits, model_and_tokenizer

from edit_hooks.answers import GeneratedText, answer_from_json, answer_to_json
from edit_hooks.decoding import Sampling
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score

CONTEXT = (5, 17, 8)
PLAIN = GenerateItem(CONTEXT, (), 32)
KINDS = {
    "greedy": PLAIN,
    "sampled": replace(PLAIN, sampling=Sampling(seed=4, top_k=50)),
    "end ignored": replace(PLAIN, ignore_end=True),
    "forced": replace(PLAIN, target=tuple(range(40, 72)), forced=True, ignore_end=True),
    "with thoughts": replace(PLAIN, think_end=3, max_new_tokens=16, max_thought_tokens=16),
}


@contextlib.contextmanager
def unreadable(token: int, value: float) -> Iterator[None]:
    """Scope in which reading a token gives logits that are not finite."""
    weight = model_and_tokenizer()[0].get_input_embeddings().weight
    row = weight.data[token].clone()
    weight.data[token] = value
    try:
        yield
    finally:
        weight.data[token] = row


def answers(item: GenerateItem, *others: GenerateItem, delta: Delta | None = None) -> list[list[GeneratedText]]:
    """Of a batch, and of one item at a time."""
    questions = [(one, delta) for one in (item, *others)]
    model, tokenizer = model_and_tokenizer()
    batched = generate(model, tokenizer, questions, Limits(), lambda count: None)
    return [batched, generate_reference(model, tokenizer, questions, lambda count: None)]


def first_reading(item: GenerateItem, free: GeneratedText, least: int, known: Collection[int]) -> tuple[int, int]:
    """A token that the model reads for the first time after ``least`` or more new tokens, and their number."""
    tokens = item.target or free.token_ids or ()
    for number, token in enumerate(tokens[:-1], 1):
        if number >= least and token not in (*known, *item.context, *tokens[: number - 1]):
            return token, number
    raise AssertionError("the model repeats itself; another context is needed")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("least", [1, 12])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "with thoughts"])
def test_a_token_that_breaks_the_model_ends_the_answer(kind: str, least: int, value: float) -> None:
    item, other = KINDS[kind], replace(PLAIN, context=(61, 9), max_new_tokens=4)
    ((free, whole), _) = answers(item, other)
    token, number = first_reading(item, free, least, (*other.context, *(whole.token_ids or ())))
    with unreadable(token, value):
        for broken, beside in answers(item, other):
            assert broken.stop == "not_finite" and not broken.is_finite
            assert broken.token_ids == (free.token_ids or ())[:number]
            assert beside == whole, "the other row of the batch has its answer"
            assert answer_from_json(answer_to_json(broken)) == broken


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_breaks_the_model_has_no_answer(kind: str) -> None:
    with unreadable(CONTEXT[1], torch.nan):
        for (broken,) in answers(KINDS[kind]):
            assert broken.stop == "not_finite" and broken.raw == "" and broken.token_ids == ()


def test_a_checkpoint_that_hides_invalid_values_has_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """``remove_invalid_values`` makes numbers of NaN and infinity, of which one is the largest."""
    monkeypatch.setattr(model_and_tokenizer()[0].generation_config, "remove_invalid_values", True)
    with unreadable(CONTEXT[1], torch.nan):
        assert {broken.stop for (broken,) in answers(PLAIN)} == {"not_finite"}


def test_a_token_without_probability_is_finite() -> None:
    """Some models give tokens that they never write the logit -inf."""
    model = model_and_tokenizer()[0]
    ((free,), _) = answers(PLAIN)
    never = next(token for token in range(100) if token not in (*CONTEXT, *(free.token_ids or ())))

    def forbid(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1, torch.tensor([never]), -torch.inf)

    handle = model.get_output_embeddings().register_forward_hook(forbid)
    try:
        for (answer,) in answers(PLAIN):
            assert answer == free
        likelihoods = [score_reference(model, [(ScoreItem(CONTEXT, (never,)), None)], lambda count: None)]
        likelihoods.append(score(model, [(ScoreItem(CONTEXT, (never,)), None)], Limits(), lambda count: None))
        assert all(answer.is_finite and answer.logprob == -torch.inf for (answer,) in likelihoods)
    finally:
        handle.remove()


@pytest.mark.parametrize("largest", [torch.nan, torch.inf])
def test_a_likelihood_of_broken_logits_is_no_number(largest: float) -> None:
    model = model_and_tokenizer()[0]
    jobs = [(ScoreItem(CONTEXT, (40, 41)), None), (ScoreItem((9, 3), (40,)), None)]
    with unreadable(CONTEXT[1], largest):
        for broken, whole in (
            score(model, jobs, Limits(), lambda count: None),
            score_reference(model, jobs, lambda count: None),
        ):
            assert not broken.is_finite and whole.is_finite


@pytest.mark.parametrize("edit", ["first", "dense"])
def test_an_edit_that_breaks_the_model_leaves_the_other_rows(edit: str) -> None:
    """Its numbers are finite, and its states overflow; low-rank edits share the batch with the unedited model."""
    model, tokenizer = model_and_tokenizer()
    delta = edits(model)[edit] or Delta()
    broken = Delta(
        factors={name: factor._replace(left=factor.left * 1e38) for name, factor in delta.factors.items()},
        dense={name: update.sign() * 3e38 for name, update in delta.dense.items()},
    )
    broken.check_finite()
    questions = [(PLAIN, broken), (PLAIN, None), (KINDS["sampled"], broken)]
    (free, *_), *_ = answers(PLAIN)
    batched = generate(model, tokenizer, questions, Limits(), lambda count: None)
    assert batched == generate_reference(model, tokenizer, questions, lambda count: None)
    assert [answer.stop for answer in batched] == ["not_finite", free.stop, "not_finite"] and batched[1] == free
