"""The same prompt edited again is recognized although rounding moved its activation."""

from __future__ import annotations

import pytest
import torch
from hook_edits import EDIT_REQUESTS, make
from torch import nn

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, build_model, build_tokenizer
from edit_hooks.memory.codebook import RADIUS_WARNING, same_prompt_distance

AGAIN = EditRequest(prompt=EDIT_REQUESTS[0].text, target_new="and")


def entries_of_two_edits(editor: str, dtype: torch.dtype, change: float) -> list[str]:
    """The rules for two edits of a prompt; between them every activation of the MLPs grows by ``change``."""
    model, tokenizer = build_model("llama", dtype=dtype), build_tokenizer(NATURAL_TOKENIZER["llama"])
    made = make(editor)
    (first,) = made.edit(model, tokenizer, [EDIT_REQUESTS[0]])
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.up_proj.weight *= 1 + change
            block.mlp.gate_proj.weight *= 1 + change
    (second,) = made.edit(model, tokenizer, [AGAIN], history=[first])
    return [str(delta.diagnostics["entry"]) for delta in (first, second)]


@pytest.mark.parametrize("editor", ["grace", "melo"])
def test_roundings_of_16_bits_make_no_other_prompt(editor):
    assert entries_of_two_edits(editor, torch.bfloat16, 2**-7) == ["first", "overwritten"]
    assert entries_of_two_edits(editor, torch.float16, 2**-10) == ["first", "overwritten"]
    assert entries_of_two_edits(editor, torch.float32, 2**-7) == ["first", "split"]  # there it is another prompt


def test_distance_in_16_bits_is_never_below_rounding():
    model = nn.Module()
    for dtype, expected in ((torch.float32, 1e-4), (torch.float16, 4 * 2**-10), (torch.bfloat16, 4 * 2**-7)):
        embeddings = nn.Embedding(2, 2, dtype=dtype)
        model.get_input_embeddings = lambda embeddings=embeddings: embeddings
        assert same_prompt_distance(1e-4, model) == pytest.approx(expected)
        assert same_prompt_distance(0.5, model) == 0.5


@pytest.mark.parametrize("editor", ["grace", "melo"])
def test_a_radius_below_rounding_is_named(editor):
    """In bfloat16 a query of norm 1 moves by 0.031 between batches."""
    for dtype, share, is_named in (
        (torch.bfloat16, 0.02, True),
        (torch.bfloat16, 0.05, False),
        (torch.float32, 0.02, False),
    ):
        model, tokenizer = build_model("llama", dtype=dtype), build_tokenizer(NATURAL_TOKENIZER["llama"])
        (probe,) = make(editor).edit(model, tokenizer, EDIT_REQUESTS[:1])
        radius = share * probe.diagnostics["query_norm"]
        (delta,) = make(editor, radius=radius).edit(model, tokenizer, EDIT_REQUESTS[:1])
        assert (RADIUS_WARNING in delta.warnings) == is_named
