"""Streams and batches of the gradient editors: stored, resumed, and undone; single equals a stream of one."""

from __future__ import annotations

import pytest
import torch
from state import assert_same_state, snapshot
from tiny import EDIT_LAYER, FT_CONFIG, LORA_CONFIG, MEND_CONFIG, REQUESTS

from edit_hooks import EditRequest, load_editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.plan import EditPlan, chunked
from edit_hooks.lm.stream import EditStream, Guard
from edit_hooks.store.store import Store

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
SETTINGS = {"ft_l": FT_CONFIG, "kn": {"layers": [EDIT_LAYER]}, "lora": LORA_CONFIG, "mend": MEND_CONFIG}


def stream(model, tokenizer, editor, size, store):
    plan = EditPlan(groups=chunked(EDIT_REQUESTS, size))
    return EditStream(model, tokenizer, load_editor(editor, SETTINGS[editor]), plan, store, Guard(), quiet=True)


@pytest.mark.parametrize(
    ("editor", "size"), [("ft_l", 1), ("ft_l", 4), ("kn", 1), ("lora", 1), ("lora", 2), ("mend", 3)]
)
def test_a_stream_repeats_and_resumes_bit_for_bit(editor, size, tiny_model, tiny_tokenizer, tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    before = snapshot(model, tokenizer)
    logits = []
    ids = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])

    def look(step, runtime_part):
        with torch.no_grad():
            logits.append(model(ids).logits)

    first = stream(model, tokenizer, editor, size, Store(tmp_path))
    first.visit(look)
    steps = len(logits)
    assert steps == -(-len(EDIT_REQUESTS) // size)
    resumed = stream(model, tokenizer, editor, size, Store(tmp_path))  # from the store
    resumed.visit(look)
    fresh = stream(model, tokenizer, editor, size, None)
    fresh.visit(look)
    for start in (steps, 2 * steps):
        for ours, theirs in zip(logits[start : start + steps], logits[:steps], strict=True):
            assert torch.equal(ours, theirs)
    assert first.final_state == resumed.final_state == fresh.final_state
    assert_same_state(before, snapshot(model, tokenizer))


@pytest.mark.parametrize("editor", sorted(SETTINGS))
def test_a_stream_of_one_edit_is_the_single_edit(editor, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    (alone,) = load_editor(editor, SETTINGS[editor]).edit(model, tokenizer, EDIT_REQUESTS[:1])
    made = stream(model, tokenizer, editor, 1, None)
    made.visit(lambda step, runtime_part: None)
    assert isinstance(made.deltas[0], Delta)
    for name, update in alone.weights().items():
        torch.testing.assert_close(made.deltas[0].weights()[name], update, atol=1e-6, rtol=1e-4)
