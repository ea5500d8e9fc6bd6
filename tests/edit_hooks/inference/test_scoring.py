"""Scoring of mixed batches against one full forward pass per item."""

from __future__ import annotations

import pytest
import torch
from inference_cases import PROMPTS, edits, model_and_tokenizer

from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.reference import score_reference
from edit_hooks.inference.scoring import score


def jobs() -> list[tuple[ScoreItem, Delta | None]]:
    model, tokenizer = model_and_tokenizer()
    items = [
        ScoreItem(
            tuple(tokenizer(prompt)["input_ids"]), tuple(tokenizer(target, add_special_tokens=False)["input_ids"])
        )
        for prompt in PROMPTS
        for target in (" Dravonia", " a long continuation")
    ]
    return [(item, delta) for item in items for delta in edits(model).values()]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_tokens=40, max_rows=3), Limits(max_tokens=1)])
def test_batches_agree_with_single_forward_passes(limits: Limits) -> None:
    model, _ = model_and_tokenizer()
    finished: list[int] = []
    questions = jobs()
    batched = score(model, questions, limits, finished.append)
    single = score_reference(model, questions, lambda count: None)
    assert sum(finished) == len(questions)
    for (item, _), ours, theirs in zip(questions, batched, single, strict=True):
        assert ours.token_ids == item.continuation and ours.token_argmax == theirs.token_argmax
        assert ours.token_logprobs is not None and theirs.token_logprobs is not None
        torch.testing.assert_close(
            torch.tensor(ours.token_logprobs), torch.tensor(theirs.token_logprobs), atol=2e-4, rtol=1e-4
        )
        assert ours.logprob == sum(ours.token_logprobs) and ours.is_greedy == theirs.is_greedy
    assert len({answer.logprob for answer in batched[:4]}) == 4  # every edit moves the answer


def test_a_greedy_continuation_is_recognized() -> None:
    item = ScoreItem((1,), (5, 6))
    assert item.answer([-1.0, -2.0], [5, 6]).is_greedy and item.answer([-1.0, -2.0], [5, 6]).logprob == -3.0
    assert not item.answer([-1.0, -2.0], [5, 7]).is_greedy
