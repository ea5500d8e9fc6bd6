"""Greedy decoding of mixed batches against the model's own generate, one item at a time."""

from __future__ import annotations

import pytest
from inference_cases import PROMPTS, edits, model_and_tokenizer

from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.generation.continuations import end_token_ids
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.inference.reference import generate_reference


def jobs(stops: tuple[str, ...], max_new_tokens: int) -> list[tuple[GenerateItem, Delta | None]]:
    model, tokenizer = model_and_tokenizer()
    items = [GenerateItem(tuple(tokenizer(prompt)["input_ids"]), stops, max_new_tokens) for prompt in PROMPTS]
    return [(item, delta) for item in items for delta in edits(model).values()]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_tokens=60, max_rows=3)])
@pytest.mark.parametrize("stops", [(), ("e", "zzz")])
def test_batches_agree_with_generate(limits: Limits, stops: tuple[str, ...]) -> None:
    model, tokenizer = model_and_tokenizer()
    questions = jobs(stops, 12)
    batched = generate(model, tokenizer, questions, limits, lambda count: None)
    assert batched == generate_reference(model, tokenizer, questions, lambda count: None)
    if stops:
        assert {answer.stop for answer in batched} == {"stop_string", "length"}


def test_an_end_token_stops_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_and_tokenizer()
    item = jobs((), 8)[0]
    (free,) = generate(model, tokenizer, [item], Limits(), lambda count: None)
    assert free.token_ids is not None and free.stop == "length" and len(free.token_ids) == 8
    monkeypatch.setattr(model.generation_config, "eos_token_id", [free.token_ids[0], 0])
    assert {free.token_ids[0], tokenizer.eos_token_id} <= end_token_ids(model, tokenizer)
    (stopped,) = generate(model, tokenizer, [item], Limits(), lambda count: None)
    assert stopped.stop == "eos" and stopped.token_ids == free.token_ids[:1]
