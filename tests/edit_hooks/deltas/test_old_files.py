"""Edits saved before the packages were rearranged still load, with the same checksum and the same answers.

The files in ``tests/data/deltas_v1`` were written by release 0.1.0 on the tiny models; ``expected.json``
holds what that release reported for them.
"""

from __future__ import annotations

import json

import pytest
from paths import TESTS

from edit_hooks import Delta, EditRequest
from edit_hooks.contract.tiny_models import REQUESTS, build_model, build_tokenizer
from edit_hooks.inference.items import ScoreItem
from edit_hooks.inference.reference import score_reference
from edit_hooks.modeling.tokens import split_continuation

FOLDER = TESTS / "data" / "deltas_v1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def scored(expected: dict, delta: Delta) -> list[list[float]]:
    model, tokenizer = build_model(expected["model_type"]), build_tokenizer(expected["tokenizer"])
    items = []
    for record in REQUESTS[:2]:
        request = EditRequest(**record)
        prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
        items.append((ScoreItem(tuple(prompt), tuple(target)), delta))
    return [answer.token_logprobs for answer in score_reference(model, items, lambda count: None)]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_edit_of_the_first_release_loads(name, tmp_path):
    expected = EXPECTED[name]
    delta = Delta.load(FOLDER / f"{name}.safetensors")
    assert delta.checksum() == expected["checksum"] and delta.writes == expected["writes"]
    assert [context.before("Who?") for context in delta.contexts] == expected.get("before", [])
    if "token_logprobs" in expected:
        rest = delta.without_contexts
        assert rest is not None
        for ours, theirs in zip(scored(expected, rest), expected["token_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)  # float32 sums on another machine
    again = tmp_path / "again.safetensors"
    delta.save(again)
    assert Delta.load(again).checksum() == expected["checksum"]
