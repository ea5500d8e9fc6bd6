"""Keys that depend on the length of a text: an answer is the same in every batch and after every other text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hook_edits import loaded
from transformers import PreTrainedModel

from edit_hooks.answers import GeneratedText
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.reference import score_reference
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.forward.length_dependence import length_rules

BORDER = 32
LENGTHS = (20, 60, 28, 45, 60, 31, 28, 6, 33, 32)  # both sides of the border; 28 to 32 cross it while decoding


def longrope() -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": BORDER,
        "partial_rotary_factor": 1.0,
    }
    return build_model("phi3", rope_parameters=rope, original_max_position_embeddings=BORDER)


def dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return build_model("llama", rope_parameters=rope, max_position_embeddings=BORDER)


def contexts() -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(5, 500) for _ in range(length)) for length in LENGTHS]


scaled = pytest.mark.parametrize("build", [longrope, dynamic])


@scaled
def test_scores_do_not_depend_on_the_batch(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    jobs = [(ScoreItem(context, (7, 8, 9)), None) for context in contexts()]
    fresh = [score_reference(build(), [job], lambda count: None)[0].logprob for job in jobs]
    for limits in (Limits(), Limits(max_rows=1)):
        found = [answer.logprob for answer in score(model, jobs, limits, lambda count: None)]
        assert found == pytest.approx(fresh, abs=1e-5)
    # `dynamic` keeps the frequencies of its longest text
    after_others = [answer.logprob for answer in score_reference(model, jobs, lambda count: None)]
    assert after_others == pytest.approx(fresh, abs=1e-5)


@scaled
def test_texts_are_those_of_generate(build: Callable[[], PreTrainedModel]) -> None:
    model, tokenizer = build(), build_tokenizer("byte_bpe")
    jobs = [(GenerateItem(context, (), 12, ignore_end=True), None) for context in contexts()]

    def tokens(answers: list[GeneratedText]) -> list[tuple[int, ...] | None]:
        return [answer.token_ids for answer in answers]

    together = tokens(generate(model, tokenizer, jobs, Limits(), lambda count: None))
    assert together == [tokens(generate(model, tokenizer, [job], Limits(), lambda count: None))[0] for job in jobs]
    for found, (item, _) in zip(together, jobs, strict=True):
        ids = torch.tensor([item.context])
        plain = build()
        plain.generation_config.eos_token_id = None
        settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        # Without a cache: up to 5.19, Phi-3 drops the cache at the border and then reads the last token alone.
        settings["use_cache"] = build is not longrope
        output = plain.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert found == tuple(output[0, len(item.context) :].tolist())


def test_other_lengths_share_batches() -> None:
    (long,), (growing,) = length_rules(longrope()), length_rules(dynamic())
    assert (long.border, growing.border) == (BORDER, BORDER)
    assert long.group(20, 32) == long.group(5, 10) == growing.group(5, 10) == growing.group(20, 32)
    assert long.group(33, 40) == long.group(60, 60) != long.group(32, 32)
    assert long.group(30, 33) == long.group(30, 40) != long.group(29, 33)  # they cross the border together
    assert growing.group(33, 40) != growing.group(60, 60)
    assert length_rules(loaded("gemma3_text")[0]) == length_rules(loaded("gpt2")[0]) == []
