"""Batches of independent edits that train side by side.

Every edit has its own parameters, loss, optimizer state and early stop, so its numbers do not depend on the others in
its batch, up to rounding. The rows of a batch run through the model in groups of similar length, and the vocabulary is
read once for the labels of all of them.

Rule for the number of edits of a batch: what they keep (parameters, gradients and Adam's two moments, four times the
trained parameters each, and the activations of their tokens) takes at most as much memory as the model's weights, or
256 MiB where these are smaller, and at most half of the free memory. On a CPU a batch has at most
:data:`MAX_TOKENS_CPU` tokens, enough for efficient matrix products. A batch has at least one edit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding
from edit_hooks.modeling.memory import bytes_per_token, free_bytes, weight_bytes

MAX_TOKENS_CPU = 320
SMALL_BUDGET = 2**28  # bytes
COPIES = 4  # of the trained parameters: themselves, gradients, two moments of Adam

# Indices of edits: a batch, in it groups of rows of similar length.
EditBatch = list[list[int]]


def split_edits(model: torch.nn.Module, lengths: Sequence[int], trained_bytes: int) -> list[EditBatch]:
    """Split independent edits into batches that train side by side, shortest first.

    Args:
        lengths: tokens of each edit's row.
        trained_bytes: size of the parameters that one edit trains.
    """
    device, budget = input_device(model), memory_budget(model)
    max_tokens = None if device.type == "cuda" else MAX_TOKENS_CPU
    batches: list[list[int]] = []
    used = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        cost = COPIES * trained_bytes + lengths[index] * bytes_per_token(model)
        is_full = used + cost > budget or (max_tokens is not None and tokens + lengths[index] > max_tokens)
        if not batches or is_full:
            batches.append([])
            used = tokens = 0
        batches[-1].append(index)
        used, tokens = used + cost, tokens + lengths[index]
    return [_grouped(batch, lengths, device) for batch in batches]


def memory_budget(model: torch.nn.Module) -> int:
    """Bytes that intermediate results may take: as many as the weights, but at most half of the free memory."""
    free = free_bytes(input_device(model))
    budget = max(weight_bytes(model), SMALL_BUDGET)
    return budget if free is None else min(budget, free // 2)


def _grouped(batch: Sequence[int], lengths: Sequence[int], device: torch.device) -> EditBatch:
    lengths = [lengths[index] for index in batch]
    groups = group_by_length(lengths, max_padding(device, lengths))
    return [[batch[position] for position in group] for group in groups]


def make_adam(leaves: Sequence[torch.Tensor], lr: float, weight_decay: float, engine: str) -> torch.optim.Adam:
    """Adam; the fast engine's in one pass over the memory where the device has it (rounds differently, by 1e-6)."""
    is_fused = engine == "fast" and all(leaf.device.type in ("cpu", "cuda") for leaf in leaves)
    return torch.optim.Adam(leaves, lr=lr, weight_decay=weight_decay, fused=is_fused)
