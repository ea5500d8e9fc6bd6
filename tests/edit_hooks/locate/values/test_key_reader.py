"""Keys and hidden states of many rows, read in one batch and cut at the fact token."""

from __future__ import annotations

import torch
from layered_edits import (
    EDIT_REQUESTS,
    LAYERS,
    each_model,
    load_wide,
)
from tiny_architectures import ARCHITECTURES

from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER
from edit_hooks.locate.values.key_reader import read_rows
from edit_hooks.locate.values.rows import rewriting_row


@each_model
def test_read_activations_do_not_depend_on_later_tokens_or_the_batch(model_type):
    model, tokenizer = load_wide(model_type)
    rows = [rewriting_row(tokenizer, request, text) for request in EDIT_REQUESTS for text in CONTEXT_TEMPLATES]
    together = read_rows(model, rows, LAYERS, EDIT_LAYER)
    arch = ARCHITECTURES[model_type]
    for index in (0, 5, len(rows) - 1):
        seen: dict[str, torch.Tensor] = {}
        handles = [
            model.get_submodule(arch.rewrite_name(layer)).register_forward_pre_hook(
                lambda _m, args, layer=layer, seen=seen: seen.update({f"key{layer}": args[0]})
            )
            for layer in LAYERS
        ]
        handles.append(
            model.get_submodule(arch.block_name(EDIT_LAYER)).register_forward_hook(
                lambda _m, _a, out, seen=seen: seen.update(hidden=out if isinstance(out, torch.Tensor) else out[0])
            )
        )
        with torch.no_grad():
            model(torch.tensor([rows[index].ids]))  # the whole sequence, target included
        for handle in handles:
            handle.remove()
        at = rows[index].position
        for layer in LAYERS:
            torch.testing.assert_close(together.keys_RF[layer][index], seen[f"key{layer}"][0, at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.hidden_RD[index], seen["hidden"][0, at], atol=1e-4, rtol=1e-4)
