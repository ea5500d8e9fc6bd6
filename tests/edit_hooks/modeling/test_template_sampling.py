"""Sampling of context templates: keys and values that are kept change no token."""

from __future__ import annotations

import pytest
import torch
from state import assert_same_state, snapshot
from tiny import NATURAL_TOKENIZER

from edit_hooks.locate.context_templates import sample_templates
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.sampling import TOP_K, _sample, sample_texts
from edit_hooks.modeling.tokens import encode

# Seed texts of one to many tokens, rows that stop after different numbers of steps, one that needs no step, and lengths
# beyond the sliding window (8 columns) of the Gemma rows.
WANTED = [("I", 7), ("Therefore the band released a new record", 30), ("You", 24), ("Q: ", 12), ("The", 1), ("I", 7)]


def uncached(model, tokenizer, wanted: list[tuple[str, int]], seed: int) -> list[list[int]]:
    """Every row by itself, from its start, for every token; all rows draw from one generator, step by step."""
    generator = torch.Generator().manual_seed(seed)
    rows = [list(encode(tokenizer, word).ids) for word, _ in wanted]
    while running := [index for index, (_, length) in enumerate(wanted) if len(rows[index]) < length]:
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([rows[i]]), use_cache=False).logits[0, -1] for i in running]
        logits_RV = torch.stack(logits).float()
        logits_RV[:, tokenizer.all_special_ids] = -torch.inf
        top = logits_RV.topk(TOP_K, dim=1)
        choice = torch.multinomial(top.values.softmax(1), 1, generator=generator)
        for index, token in zip(running, top.indices.gather(1, choice)[:, 0].tolist(), strict=True):
            rows[index].append(token)
    return rows


class Recording:
    """A tokenizer that keeps the token ids it is asked to decode."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.tokenizer(*args, **kwargs)

    def decode(self, ids, **kwargs):
        self.decoded.append(list(ids))
        return self.tokenizer.decode(ids, **kwargs)


def cached(model, tokenizer, wanted, seed) -> list[list[int]]:
    recording = Recording(tokenizer)
    with frozen(model), torch.no_grad():
        _sample(model, recording, wanted, torch.Generator().manual_seed(seed))
    return recording.decoded


FAMILIES = ("gpt2", "gptj", "gpt_neox", "llama", "qwen3", "gemma3_text", "olmo2")


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    # Not Gemma 2 in float64: its attention takes float64's lowest number to float32, where it is -inf, and padding
    # further from the text than the window becomes NaN.
    [*((family, torch.float64) for family in FAMILIES), *((family, torch.float32) for family in (*FAMILIES, "gemma2"))],
)
def test_the_tokens_are_those_of_texts_recomputed_from_their_start(tiny_model, tiny_tokenizer, model_type, dtype):
    model, tokenizer = tiny_model(model_type, dtype=dtype), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    widths = {len(encode(tokenizer, word).ids) for word, _ in WANTED}
    assert len(widths) >= 3
    for seed in (0, 1):
        rows = cached(model, tokenizer, WANTED, seed)
        assert rows == uncached(model, tokenizer, WANTED, seed)
        assert [len(row) for row in rows] == [max(n, len(encode(tokenizer, word).ids)) for word, n in WANTED]
    assert cached(model, tokenizer, WANTED, 0) != cached(model, tokenizer, WANTED, 1)


def test_each_step_reads_one_token_of_the_rows_that_go_on(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    shapes = []
    handle = model.get_submodule("model.embed_tokens").register_forward_hook(
        lambda _module, args, _output: shapes.append(tuple(args[0].shape))
    )
    starts = [len(encode(tokenizer, word).ids) for word, _ in WANTED]
    cached(model, tokenizer, WANTED, 0)
    handle.remove()
    missing = [length - start for start, (_, length) in zip(starts, WANTED, strict=True) if length > start]
    assert shapes[0] == (len(missing), max(n for n, (_, m) in zip(starts, WANTED, strict=True) if m > n))
    assert shapes[1:] == [(sum(n > step for n in missing), 1) for step in range(1, max(missing))]


def test_the_model_and_the_global_generator_are_left_alone(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("gemma3_text"), tiny_tokenizer("unigram_bos")
    before = snapshot(model, tokenizer)
    texts = sample_templates(model, tokenizer, "sampled_11", 3)
    assert len(texts) == 11 and texts[0] == "{}" and all(text.count("{}") == 1 for text in texts)
    assert len(sample_texts(model, tokenizer, per_word=2, length=6, seed=0)) == 10
    assert sample_templates(model, tokenizer, "bare", 3) == ["{}"]
    assert_same_state(before, snapshot(model, tokenizer))
