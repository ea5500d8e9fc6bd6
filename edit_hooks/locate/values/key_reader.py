"""Keys, module outputs and hidden states at the fact tokens of many rows.

Each row is read under its own edit.

Rows are cut after the fact token, which by causality changes nothing, and the forward pass stops after the last block
that is read. Shapes: R rows, d residual width, f MLP width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.modeling.architectures import architecture_of, input_device, unwrapped
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output, record_at, stop_after
from edit_hooks.utils.batching import token_batches

MAX_TOKENS = 2**14


@dataclass
class LayerActivations:
    """Activations at the fact token of every row, by layer, at least float32.

    Attributes:
        keys_RF: by layer, input of the rewrite module. outputs_RD: by layer, its output.
        hidden_RD: output of the last block that was read.
    """

    keys_RF: dict[int, torch.Tensor]
    outputs_RD: dict[int, torch.Tensor]
    hidden_RD: torch.Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[LayerActivations]) -> LayerActivations:
        """The rows of all parts, one after another."""
        return cls(
            keys_RF={layer: torch.cat([part.keys_RF[layer] for part in parts]) for layer in parts[0].keys_RF},
            outputs_RD={layer: torch.cat([part.outputs_RD[layer] for part in parts]) for layer in parts[0].outputs_RD},
            hidden_RD=torch.cat([part.hidden_RD for part in parts]),
        )

    def select(self, rows: torch.Tensor) -> LayerActivations:
        """The activations of some rows, in the order of ``rows``."""
        return LayerActivations(
            keys_RF={layer: keys_RF[rows] for layer, keys_RF in self.keys_RF.items()},
            outputs_RD={layer: outputs_RD[rows] for layer, outputs_RD in self.outputs_RD.items()},
            hidden_RD=self.hidden_RD[rows],
        )


@torch.no_grad()
def read_rows(
    model: nn.Module,
    rows: Sequence[TokenRow],
    layers: Sequence[int],
    last: int,
    deltas: Sequence[Delta | None] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> LayerActivations:
    """Read the rewrite modules of ``layers`` and the output of block ``last``.

    Args:
        deltas: per row the low-rank edit it is read under, in addition to what is written into the weights.
        max_tokens: bound on the tokens of one forward pass, padding included.
    """
    inner = unwrapped(model)
    lengths = [row.position + 1 for row in rows]
    shortest_first = sorted(range(len(rows)), key=lambda index: lengths[index])
    parts, order = [], []
    with frozen(inner):
        for batch in token_batches(shortest_first, lengths, max_tokens):
            adapters = PerRowAdapters(inner, [deltas[i] for i in batch]) if deltas else contextlib.nullcontext()
            with adapters:
                parts.append(_read_batch(inner, [rows[i] for i in batch], layers, last))
            order += batch
    return LayerActivations.concatenate(parts).select(torch.tensor(order).argsort())


def _read_batch(model: Any, rows: Sequence[TokenRow], layers: Sequence[int], last: int) -> LayerActivations:
    arch, device = architecture_of(model), input_device(model)
    ids_RT, mask_RT = right_padded([row.ids[: row.position + 1] for row in rows], device)
    position_R = torch.tensor([row.position for row in rows])
    keys: dict[int, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    hidden: dict[int, torch.Tensor] = {}
    block = model.get_submodule(arch.block_name(last))
    registrations = [on_output(block, record_at(hidden, last, position_R))]
    for layer in layers:
        rewrite = model.get_submodule(arch.rewrite_name(layer))
        registrations += [
            on_input(rewrite, record_at(keys, layer, position_R)),
            on_output(rewrite, record_at(outputs, layer, position_R)),
        ]
    with hooks(*registrations), stop_after(block):
        model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
    return LayerActivations(
        keys_RF={layer: keys[layer].to(device) for layer in layers},
        outputs_RD={layer: outputs[layer].to(device) for layer in layers},
        hidden_RD=hidden[last].to(device),
    )


def mean_keys(keys_RF: torch.Tensor, num_requests: int) -> torch.Tensor:
    """Weighted means [E, f] of the keys of each request's rows."""
    keys_ENF = keys_RF.view(num_requests, -1, keys_RF.shape[1])
    weights_N = key_weights(keys_ENF.shape[1]).to(keys_RF.device)
    return torch.einsum("n,enf->ef", weights_N.to(keys_RF.dtype), keys_ENF)


def key_weights(num_templates: int) -> torch.Tensor:
    """Weights [N] of the key mean: half for the bare prompt, half for the others."""
    if num_templates == 1:
        return torch.ones(1, dtype=torch.float64)
    others = torch.full((num_templates - 1,), 0.5 / (num_templates - 1), dtype=torch.float64)
    return torch.cat([torch.tensor([0.5], dtype=torch.float64), others])
