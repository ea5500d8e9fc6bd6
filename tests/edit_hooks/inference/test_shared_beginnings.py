"""Prompts that begin alike: the shared tokens run once, and the answers are those of every prompt alone.

Float64, narrowed nowhere (`keep_wide`), so that a bound of 1e-8 separates another formula from rounding. The beginnings
are longer than the sliding windows of the tiny models.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import hook_edits
import pytest
from hook_edits import EDIT_REQUESTS, stream_of
from inference_cases import edits
from value_problems import LIMIT, each_model, keep_wide, loaded

from edit_hooks.deltas.delta import Delta
from edit_hooks.inference import batching
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.architectures import decoder_of

DEMONSTRATIONS = "The train was late. Elena waited in the museum. It rained. They say that the parliament "
QUESTIONS = ["of Port Elna belongs to", "of", "meets in the city of"]
APART = "Lake"


@pytest.fixture(autouse=True)
def _shared_from_16_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batching, "MIN_SHARED_TOKENS", 16)
    with keep_wide():
        yield


def contexts(tokenizer) -> list[tuple[int, ...]]:
    prompts = [*(DEMONSTRATIONS + question for question in QUESTIONS), APART]
    return [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]


def one_of_each_kind(model) -> list[Delta | None]:
    """No edit, one that acts per row, one that is written into the weights."""
    by_name = edits(model)
    return [by_name[name] for name in ("none", "first", "dense")]


def tokens_run(model, call):
    """What ``call`` returns, and the number of tokens, padding included, that the decoder was given."""
    given: list[int] = []

    def count(_module, args, kwargs):
        given.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel())

    with decoder_of(model).register_forward_pre_hook(count, with_kwargs=True):
        return call(), sum(given)


def with_fewer_tokens(model, share, call):
    """What ``call`` returns, which runs at most this share of the tokens that it runs without shared beginnings."""
    with mock.patch.object(batching, "MIN_SHARED_TOKENS", 10**6):
        _, apart = tokens_run(model, call)
    returned, tokens = tokens_run(model, call)
    assert tokens <= share * apart
    return returned


@each_model
def test_scores_are_those_of_single_passes(model_type):
    model, tokenizer = loaded(model_type)
    deltas = one_of_each_kind(model)
    targets = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (" Dravonia", " a long end")]
    jobs = [
        (ScoreItem(context, target), delta) for context in contexts(tokenizer) for target in targets for delta in deltas
    ]
    shared = with_fewer_tokens(model, 0.6, lambda: score(model, jobs, Limits(), lambda count: None))
    for ours, theirs in zip(shared, score_reference(model, jobs, lambda count: None), strict=True):
        assert ours.token_argmax == theirs.token_argmax
        for one, other in zip(ours.token_logprobs, theirs.token_logprobs, strict=True):
            assert abs(one - other) < LIMIT * abs(other)
    assert len({answer.logprob for answer in shared[: len(deltas)]}) == len(deltas)  # every edit moves the answer


def test_candidates_of_one_prompt_share_all_but_its_last_token():
    """Also copies of one prompt to be continued; the state at the last token is what answers are read from."""
    model, tokenizer = loaded("llama")
    context = contexts(tokenizer)[0]
    jobs = [(ScoreItem(context, (token, 5)), None) for token in (40, 41, 42)]
    scored = with_fewer_tokens(model, 0.4, lambda: score(model, jobs, Limits(), lambda count: None))
    for ours, theirs in zip(scored, score_reference(model, jobs, lambda count: None), strict=True):
        assert ours.token_argmax == theirs.token_argmax and abs(ours.logprob - theirs.logprob) < LIMIT * 10
    copies = [(GenerateItem(context, (), length), None) for length in (1, 3, 4)]
    texts = with_fewer_tokens(model, 0.5, lambda: generate(model, tokenizer, copies, Limits(), lambda count: None))
    assert texts == generate_reference(model, tokenizer, copies, lambda count: None)


@each_model
def test_texts_are_those_of_single_prompts(model_type):
    """Rows stop at different steps, and the batches have fewer rows than the prompts that share a beginning."""
    model, tokenizer = loaded(model_type)
    items = [GenerateItem(context, ("e",), 6) for context in contexts(tokenizer)]
    deltas = one_of_each_kind(model)
    jobs = [(item, delta) for item in items for delta in deltas]
    answers = with_fewer_tokens(
        model, 0.6, lambda: generate(model, tokenizer, jobs, Limits(max_rows=3), lambda count: None)
    )
    assert answers == generate_reference(model, tokenizer, jobs, lambda count: None)


def batches_of(model, deltas, beginnings) -> list[Batch]:
    batches: list[Batch] = []
    lengths = [len(tokens) + 1 for tokens in beginnings]
    run_in_batches(model, deltas, lengths, Limits(), batches.append, dict(enumerate(beginnings)))
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(deltas)))
    return batches


def test_only_prompts_of_one_edit_share_a_beginning():
    """Not those under a hook edit, which reads prompts as a whole, and no short beginnings."""
    model, tokenizer = hook_edits.loaded("llama")
    by_name = edits(model)
    (codebook,) = stream_of("grace", model, tokenizer, EDIT_REQUESTS[:1])
    long, short = tuple(range(5, 25)), tuple(range(30, 45))
    kinds = [None, by_name["first"], by_name["second"], by_name["dense"], codebook]
    deltas = [kinds[kind] for kind in (0, 0, 1, 2, 1, 3, 3, 4, 4, 0, 0)]
    beginnings = [(*long, 50 + number) for number in range(9)] + [(*short, 60), (*short, 61)]
    shared = [batch for batch in batches_of(model, deltas, beginnings) if batch.prefix is not None]
    assert [batch.indices for batch in shared] == [[0, 1], [2, 4], [5, 6]]
    assert [batch.num_known for batch in shared] == [20, 20, 20]
    # The written edit is in the weights; no part of it is left to act per row.
    assert [batch.deltas for batch in shared] == [[None] * 2, [by_name["first"]] * 2, [None] * 2]


@pytest.mark.parametrize(("rope", "shared"), [("default", True), ("longrope", False), ("dynamic", False)])
@pytest.mark.parametrize("by_layer_type", [False, True])
def test_nothing_is_shared_where_keys_depend_on_the_length(rope, shared, by_layer_type, monkeypatch):
    model, _ = hook_edits.loaded("gemma3_text" if by_layer_type else "phi3")
    parameters = {**model.config.rope_parameters}
    if by_layer_type:
        parameters["full_attention"] = {**parameters["full_attention"], "rope_type": rope}
    else:
        parameters["rope_type"] = rope
    monkeypatch.setattr(model.config, "rope_parameters", parameters)
    beginning = tuple(range(5, 25))
    batches = batches_of(model, [None, None], [(*beginning, 30), (*beginning, 31)])
    assert any(batch.prefix for batch in batches) == shared


def test_without_beginnings_every_item_runs_in_full():
    model, _ = hook_edits.loaded("llama")
    batches: list[Batch] = []
    run_in_batches(model, [None, None], [30, 30], Limits(), batches.append)
    assert [(batch.indices, batch.prefix) for batch in batches] == [([0, 1], None)]
