"""Keys, module outputs and hidden states at the fact tokens of many rows, each row under its own edit.

Rows are cut after the fact token, because by causality nothing later can matter, and the pass ends after the last block
that is asked for. Shapes: R rows, d residual width, f MLP width.
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
from edit_hooks.locate.rows import Row
from edit_hooks.modeling.architectures import architecture_of, input_device, unwrapped
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output
from edit_hooks.modeling.tensors import at_least_float32

MAX_TOKENS = 2**14


@dataclass
class Reading:
    """Activations at the fact token of every row.

    Attributes:
        keys_RF: by layer, input of the rewrite module. outputs_RD: by layer, its output.
        hidden_RD: output of the last block that was asked for.
    """

    keys_RF: dict[int, torch.Tensor]
    outputs_RD: dict[int, torch.Tensor]
    hidden_RD: torch.Tensor


class _Enough(Exception):
    """Ends a forward pass after the last block that matters."""


@torch.no_grad()
def read_rows(
    model: nn.Module,
    rows: Sequence[Row],
    layers: Sequence[int],
    last: int,
    deltas: Sequence[Delta | None] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Reading:
    """Read the rewrite modules of ``layers`` and the output of block ``last``.

    Args:
        deltas: the low-rank edit under which each row is read, besides what is patched into the model.
        max_tokens: bound on the tokens of one forward pass.
    """
    inner = unwrapped(model)
    parts: list[tuple[list[int], Reading]] = []
    with frozen(inner):
        for chunk in _chunks(rows, max_tokens):
            scope = PerRowAdapters(inner, [deltas[i] for i in chunk]) if deltas else contextlib.nullcontext()
            with scope:
                parts.append((chunk, _read(inner, [rows[i] for i in chunk], layers, last)))
    order = torch.tensor([index for chunk, _ in parts for index in chunk]).argsort()
    return Reading(
        keys_RF={n: torch.cat([part.keys_RF[n] for _, part in parts])[order] for n in layers},
        outputs_RD={n: torch.cat([part.outputs_RD[n] for _, part in parts])[order] for n in layers},
        hidden_RD=torch.cat([part.hidden_RD for _, part in parts])[order],
    )


def _chunks(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Indices of rows read together: similar lengths side by side, padded size within the bound."""
    chunks: list[list[int]] = [[]]
    for index in sorted(range(len(rows)), key=lambda i: rows[i].position):
        if chunks[-1] and (len(chunks[-1]) + 1) * (rows[index].position + 1) > max_tokens:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _read(model: Any, rows: Sequence[Row], layers: Sequence[int], last: int) -> Reading:
    arch = architecture_of(model)
    device = input_device(model)
    width = max(row.position for row in rows) + 1
    ids_RT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_RT = torch.zeros_like(ids_RT)
    for index, row in enumerate(rows):
        ids_RT[index, : row.position + 1] = torch.tensor(row.ids[: row.position + 1])
        mask_RT[index, : row.position + 1] = 1
    position_R = torch.tensor([row.position for row in rows])
    kept: dict[Any, torch.Tensor] = {}

    def keep(name: Any) -> Any:
        def read(hidden: torch.Tensor) -> None:
            kept[name] = at_least_float32(hidden[torch.arange(len(rows)), position_R.to(hidden.device)]).to(device)

        return read

    def stop(_hidden: torch.Tensor) -> None:
        raise _Enough

    registrations = []
    for layer in layers:
        rewrite = model.get_submodule(arch.rewrite_name(layer))
        registrations += [on_input(rewrite, keep(("key", layer))), on_output(rewrite, keep(("output", layer)))]
    block = model.get_submodule(arch.block_name(last))
    registrations += [on_output(block, keep("hidden")), on_output(block, stop)]
    with hooks(*registrations), contextlib.suppress(_Enough):
        model(input_ids=ids_RT.to(device), attention_mask=mask_RT.to(device), use_cache=False)
    return Reading(
        keys_RF={layer: kept["key", layer] for layer in layers},
        outputs_RD={layer: kept["output", layer] for layer in layers},
        hidden_RD=kept["hidden"],
    )
