"""Greedy decoding under a checkpoint's generation configuration, against the model's own generate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from inference_cases import PROMPTS, edits, model_and_tokenizer

from edit_hooks.answers import GeneratedText
from edit_hooks.decoding import Sampling
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.generation.checkpoint_rules import CheckpointRules
from edit_hooks.inference.generation.continuations import end_token_ids
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.inference.reference import generate_reference
from edit_hooks.modeling.fingerprint.generation_settings import FOLLOWED, NO_EFFECT, NOT_FOLLOWED, generation_settings
from edit_hooks.utils.errors import EditingError

LENGTH = 9

# Entry -> its value, from the tokens that the model writes without it; with its end token, if it is about one.
ENTRIES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "sequence_bias": lambda free: {"sequence_bias": [[[free[0]], -100.0], [free[1:3], -100.0]]},
    "encoder_repetition_penalty": lambda free: {"encoder_repetition_penalty": 9.0},
    "repetition_penalty": lambda free: {"repetition_penalty": 3.0},
    "no_repeat_ngram_size": lambda free: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda free: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda free: {"bad_words_ids": [[free[1]], free[:2]]},
    "min_length": lambda free: {"min_length": 99, "eos_token_id": [free[2]]},
    "min_new_tokens": lambda free: {"min_new_tokens": 6, "eos_token_id": [free[2]]},
    "forced_bos_token_id": lambda free: {"forced_bos_token_id": 7},
    "forced_eos_token_id": lambda free: {"forced_eos_token_id": 5, "eos_token_id": [5]},
    "exponential_decay_length_penalty": lambda free: {
        "exponential_decay_length_penalty": (1, 9.0),
        "eos_token_id": [3, 5],
    },
    "suppress_tokens": lambda free: {"suppress_tokens": [free[0], free[3]]},
    "begin_suppress_tokens": lambda free: {"begin_suppress_tokens": [free[0]]},
}


def item_of(prompt: str, **fields: Any) -> GenerateItem:
    ids = tuple(model_and_tokenizer()[1](prompt)["input_ids"])
    return GenerateItem(**{"context": ids, "stops": (), "max_new_tokens": LENGTH, **fields})


def decoded(*jobs: tuple[GenerateItem, Delta | None]) -> list[GeneratedText]:
    """The answers, equal in both engines."""
    fast = generate(*model_and_tokenizer(), list(jobs), Limits(), lambda count: None)
    assert fast == generate_reference(*model_and_tokenizer(), list(jobs), lambda count: None)
    return fast


def configure(monkeypatch: pytest.MonkeyPatch, **entries: Any) -> None:
    for name, value in entries.items():
        monkeypatch.setattr(model_and_tokenizer()[0].generation_config, name, value, raising=False)


@functools.cache
def free_answers() -> tuple[list[GenerateItem], list[GeneratedText]]:
    """Items, and their answers without any entry."""
    items = [item_of(prompt) for prompt in PROMPTS]
    # A prompt of one token, before which a text begins; prompts of many tokens, of which the answer repeats some.
    contexts = [(4,), *(tuple(range(start, start + 100)) for start in range(4, 304, 100))]
    items += [replace(items[0], context=context) for context in contexts]
    return items, decoded(*((item, None) for item in items))


@pytest.mark.parametrize("entry", [name for name in FOLLOWED if name != "remove_invalid_values"])
def test_every_entry_is_followed_as_in_generate(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_and_tokenizer()
    items, free = free_answers()
    settings = ENTRIES[entry](list(free[0].token_ids or ()))
    others = {name: value for name, value in settings.items() if name not in FOLLOWED}
    configure(monkeypatch, **others)
    without = decoded(*((item, None) for item in items)) if others else free
    configure(monkeypatch, **settings)
    assert list(generation_settings(model)) == [entry]
    under_edits = [(item, delta) for item in items[:2] for delta in edits(model).values()]
    plain = decoded(*((item, None) for item in items), *under_edits)[: len(items)]
    assert plain != without
    lengths = {"max_new_tokens": LENGTH, "eos_token_id": sorted(end_token_ids(model, tokenizer)), "pad_token_id": 0}
    for item, answer in zip(items, plain, strict=True):
        ids = torch.tensor([item.context])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths)
        assert whole[0, len(item.context) :].tolist() == list(answer.token_ids or ())


def test_scores_that_are_not_numbers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_tokenizer()
    configure(monkeypatch, remove_invalid_values=True)
    rules = CheckpointRules(generation_settings(model), item_of(PROMPTS[0]), [])
    assert rules.token([], torch.tensor([-3.0, torch.nan, -5.0])) == 1  # becomes 0


def test_forced_texts_draws_and_given_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher forcing and draws do not follow the rules; a text of a given length has no end to be forced."""
    target = item_of(PROMPTS[2]).context[:6]
    forced = item_of(PROMPTS[0], max_new_tokens=6, ignore_end=True, target=target, forced=True)
    drawn = item_of(PROMPTS[0], sampling=Sampling(seed=3, top_k=4))
    fixed = item_of(PROMPTS[0], ignore_end=True)
    jobs = [(forced, None), (drawn, None), (fixed, None)]
    before = decoded(*jobs)
    configure(monkeypatch, forced_eos_token_id=5, min_length=99, exponential_decay_length_penalty=(1, 9.0))
    assert decoded(*jobs) == before
    configure(monkeypatch, suppress_tokens=list((before[2].token_ids or ())[:1]))
    after = decoded(*jobs)
    assert after[:2] == before[:2] and after[2] != before[2]


def test_sampling_settings_of_a_checkpoint_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_tokenizer()
    before = decoded((item_of(PROMPTS[0]), None))
    configure(monkeypatch, do_sample=True, temperature=0.6, top_p=0.9, top_k=3, repetition_penalty=1.0, max_length=11)
    assert decoded((item_of(PROMPTS[0]), None)) == before and generation_settings(model) == {}


def test_a_value_that_transformers_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, repetition_penalty=-1.0)
    with pytest.raises(EditingError, match="generation_config cannot be used: ValueError: `penalty` has to be"):
        generate(*model_and_tokenizer(), [(item_of(PROMPTS[0]), None)], Limits(), lambda count: None)


def test_entries_are_of_one_kind() -> None:
    known = model_and_tokenizer()[0].generation_config.to_dict().keys()
    assert not (FOLLOWED.keys() & NOT_FOLLOWED.keys() or (FOLLOWED | NOT_FOLLOWED).keys() & NO_EFFECT.keys())
    assert known >= FOLLOWED.keys() and known <= {*FOLLOWED, *NOT_FOLLOWED, *NO_EFFECT, "max_new_tokens"}
