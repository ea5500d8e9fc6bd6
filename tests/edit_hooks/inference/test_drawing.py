"""Seeded draws: the distribution by hand, and answers that depend on seed, draw and prompt alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from inference_cases import PROMPTS, edits, model_and_tokenizer
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from edit_hooks.answers import GeneratedText
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.generation.continuations import end_token_ids
from edit_hooks.inference.generation.drawing import TokenDraw, distribution
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.inference.reference import generate_reference
from edit_hooks.utils.errors import EditingError

LOGITS = torch.tensor([math.log(0.1), math.log(0.4), math.log(0.2), math.log(0.3)])


@pytest.mark.parametrize(
    ("sampling", "probabilities", "tokens"),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1], [1, 3, 2, 0]),
        (Sampling(top_k=2), [4 / 7, 3 / 7], [1, 3]),
        (Sampling(top_k=9), [0.4, 0.3, 0.2, 0.1], [1, 3, 2, 0]),
        (Sampling(top_p=0.69), [4 / 7, 3 / 7], [1, 3]),  # the token that crosses the bound is kept
        (Sampling(top_p=0.71), [4 / 9, 3 / 9, 2 / 9], [1, 3, 2]),
        (Sampling(top_k=3, top_p=0.5), [4 / 7, 3 / 7], [1, 3]),  # top-p of the renormalized top-k: 4/9 < 1/2
        (Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30], [1, 3, 2, 0]),
    ],
)
def test_the_distribution_by_hand(sampling: Sampling, probabilities: list[float], tokens: list[int]) -> None:
    found, order = distribution(LOGITS, sampling)
    assert order.tolist() == tokens
    assert found.tolist() == pytest.approx(probabilities, abs=1e-6)


def of_transformers(logits: torch.Tensor, sampling: Sampling) -> list[float]:
    """The distribution after the logits processors of ``generate``, in their order."""
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    processors += [] if sampling.top_k is None else [TopKLogitsWarper(sampling.top_k)]
    processors += [] if sampling.top_p is None else [TopPLogitsWarper(sampling.top_p)]
    scores = logits[None].double()
    for processor in processors:
        scores = processor(torch.zeros(1, 0, dtype=torch.long), scores)
    probabilities: list[float] = scores[0].softmax(0).tolist()
    return probabilities


@pytest.mark.parametrize("top_k", [None, 1, 2, 4, 40, 999])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("tied", [False, True])
def test_the_distribution_is_that_of_transformers(top_k: int | None, top_p: float | None, tied: bool) -> None:
    """Also among equal logits; which of them top-p drops is up to its sort, so only their number counts."""
    logits = 3 * torch.randn(20, 60, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(top_k=top_k, top_p=top_p, temperature=0.7)
    for row in logits.round() if tied else logits:
        probabilities, tokens = distribution(row, sampling)
        found = torch.zeros(len(row), dtype=torch.float64)
        found[tokens] = probabilities
        expected = of_transformers(row, sampling)
        if tied and top_p is not None:
            assert sorted(found.tolist()) == pytest.approx(sorted(expected), abs=1e-12)
        else:
            assert found.tolist() == pytest.approx(expected, abs=1e-12)
        assert probabilities.tolist() == sorted(probabilities.tolist(), reverse=True)


def test_top_k_keeps_ties_of_the_last_kept_logit() -> None:
    _, tokens = distribution(torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]), Sampling(top_k=2))
    assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(top_k=2, top_p=0.5)])
@pytest.mark.parametrize("broken", [[math.nan] * 4, [1.0, math.nan, 2.0, math.nan], [0.0, math.inf, math.inf, 9.0]])
def test_logits_without_a_distribution_give_the_greedy_token(broken: list[float], sampling: Sampling) -> None:
    logits = torch.tensor(broken)
    draw = TokenDraw(GenerateItem((1, 2), (), 1, sampling=sampling))
    assert draw.token(logits) == int(logits.argmax())
    assert draw.token(LOGITS) in range(4)


@pytest.mark.parametrize("reference", [False, True])
def test_an_edit_that_breaks_the_model_does_not_stop_the_draws_of_others(reference: bool) -> None:
    """Its factors are finite, and its states overflow: all logits are NaN."""
    model, tokenizer = model_and_tokenizer()
    module, factor = next(iter((edits(model)["first"] or Delta()).factors.items()))
    broken = Delta(factors={module: factor._replace(left=factor.left * 1e25, right=factor.right * 1e25)})
    plain, _ = jobs(Sampling(seed=1, top_k=5))[0]
    questions: list[tuple[GenerateItem, Delta | None]] = [(plain, broken), (plain, None)]
    answers = generate_reference(model, tokenizer, questions, lambda count: None) if reference else answer(questions)
    greedy = answer([(replace(plain, sampling=None), broken)])
    assert answers == [*greedy, *answer([(plain, None)])]


def test_draws_follow_the_distribution() -> None:
    item = GenerateItem((1, 2), (), 1, sampling=Sampling(seed=3))
    draws = (TokenDraw(replace(item, sampling=Sampling(seed=3, draw=number))) for number in range(4000))
    counts = Counter(draw.token(LOGITS) for draw in draws)
    # three standard errors of a share of 4000 draws are at most 0.024
    assert [counts[token] / 4000 for token in range(4)] == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.024)


def jobs(sampling: Sampling | None, **settings: object) -> list[tuple[GenerateItem, Delta | None]]:
    model, tokenizer = model_and_tokenizer()
    items = [GenerateItem(tuple(tokenizer(prompt)["input_ids"]), (), 8, sampling=sampling) for prompt in PROMPTS]
    return [(replace(item, **settings), delta) for item in items for delta in edits(model).values()]


def answer(questions: list[tuple[GenerateItem, Delta | None]], limits: Limits | None = None) -> list[GeneratedText]:
    return generate(*model_and_tokenizer(), questions, limits or Limits(), lambda count: None)


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(seed=1, top_k=5, temperature=0.7, top_p=0.9)])
def test_an_answer_does_not_depend_on_its_batch(sampling: Sampling) -> None:
    questions = jobs(sampling)
    together = answer(questions)
    assert together == [answer([question])[0] for question in questions]
    assert together == answer(questions[::-1], Limits(max_tokens=60, max_rows=3))[::-1]
    assert together == generate_reference(*model_and_tokenizer(), questions, lambda count: None)


def test_seeds_and_draws_give_different_answers_and_the_rest_is_greedy() -> None:
    greedy, first, second, third = (
        [one.token_ids for one in answer(jobs(sampling))]
        for sampling in (None, Sampling(seed=1), Sampling(seed=2), Sampling(seed=1, draw=1))
    )
    assert first != second and first != third and second != third and greedy not in (first, second, third)
    question = jobs(None)[0]
    sampled = (replace(question[0], sampling=Sampling(seed=1)), question[1])
    assert answer([question, sampled])[0].token_ids == greedy[0]  # a greedy row beside a sampled one
    assert [one.token_ids for one in answer(jobs(Sampling(seed=5, top_k=1)))] == greedy


def test_an_answer_goes_on_after_an_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_and_tokenizer()
    question = jobs(None)[0]
    (free,) = answer([question])
    assert free.token_ids is not None
    monkeypatch.setattr(model.generation_config, "eos_token_id", [free.token_ids[1]])
    assert free.token_ids[1] in end_token_ids(model, tokenizer)
    assert answer([question])[0].token_ids == free.token_ids[:2]
    going_on = [(replace(question[0], ignore_end=True), question[1])]
    assert answer(going_on) == [free] == generate_reference(model, tokenizer, going_on, lambda count: None)


def test_a_thought_has_a_budget_of_its_own() -> None:
    """Thought of at most three tokens and answer of at most two; without an end of the thought there is no answer."""
    question, delta = jobs(None)[0]
    (free,) = answer([(question, delta)])
    assert free.token_ids is not None and len(free.token_ids) == 8
    end = free.token_ids[2]
    assert end not in free.token_ids[:2]  # the thought ends with the third token

    def think(max_thought_tokens: int) -> GeneratedText:
        item = replace(question, think_end=end, max_new_tokens=2, max_thought_tokens=max_thought_tokens)
        (given,) = answer([(item, delta)])
        assert [given] == generate_reference(*model_and_tokenizer(), [(item, delta)], lambda count: None)
        return given

    assert think(3).token_ids == free.token_ids[3:5] and not think(3).unfinished
    assert think(2).unfinished


def test_repeated_ends_of_a_thought_do_not_lengthen_the_answer() -> None:
    """A collapsed model writes nothing else; thought and answer have at most as many tokens as both budgets."""
    model, tokenizer = build_model("llama"), model_and_tokenizer()[1]
    end, passes = 300, 0
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.arange(model.config.vocab_size) == end)
    question = replace(jobs(None)[0][0], think_end=end, max_new_tokens=3, max_thought_tokens=5)

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1
        assert passes <= 100, "the answer has both budgets, and goes on"

    model.model.layers[0].register_forward_hook(count)
    (given,) = generate(model, tokenizer, [(question, None)], Limits(), lambda count: None)
    assert (given.stop, given.token_ids, given.unfinished) == ("length", (), False)
    assert given.thought == tokenizer.decode([end] * 8)
    assert generate_reference(model, tokenizer, [(question, None)], lambda count: None) == [given]


def test_settings_are_read_from_json_and_checked() -> None:
    decoding = Decoding(until=(".",), ignore_end=True, sampling=Sampling(top_k=5, seed=7), max_new_tokens=100)
    assert Decoding.from_json(decoding.to_json()) == decoding
    assert decoding.to_json()["until"] == ["."]
    for settings, message in (
        ({"max_tokens": 3}, "Did you mean 'max_new_tokens'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"sampling": {"temperature": 0.0}}, "temperature is 0"),
        ({"sampling": {"top_p": 1.5}}, "top_p is 1.5"),
        ({"length_of": "x", "max_new_tokens": 3}, "length_of fixes the length"),
    ):
        with pytest.raises(EditingError, match=message):
            Decoding.from_json(settings)
