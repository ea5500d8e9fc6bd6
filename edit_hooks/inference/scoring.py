"""Batched scoring of continuations under edits.

Low-rank edits and most hook edits act per row (`RowEdits`), so rows of different edits and of the unedited model share
a batch. Other edits are written into the weights, scored and undone one after another. Prompts are right-padded, and
a long beginning that several share is run once; both are exact under causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from edit_hooks.answers import ScoredContinuation
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.forward.vocab_loss import log_likelihoods
from edit_hooks.utils.progress import Finished, Progress, ignore_finished


def score(
    model: nn.Module,
    items: Sequence[tuple[ScoreItem, Delta | None]],
    limits: Limits,
    progress: Progress,
    finished: Finished = ignore_finished,
) -> list[ScoredContinuation]:
    """Score continuations under teacher forcing, each under its own edit.

    Args:
        finished: gets the answers of each batch.

    Returns:
        One answer per item, in the order of the items.
    """
    inner = unwrapped(model)
    lengths = [len(item.context) + len(item.continuation) - 1 for item, _ in items]
    answers: dict[int, ScoredContinuation] = {}

    def run(batch: Batch) -> None:
        scored = _score_batch(inner, [items[index][0] for index in batch.indices], batch)
        answers.update(zip(batch.indices, scored, strict=True))
        finished(batch.indices, scored)
        progress(len(scored))

    beginnings = {index: item.context[:-1] for index, (item, _) in enumerate(items)}
    run_in_batches(model, [delta for _, delta in items], lengths, limits, run, beginnings)
    return [answers[index] for index in range(len(items))]


@torch.no_grad()
def _score_batch(model: nn.Module, items: list[ScoreItem], batch: Batch) -> list[ScoredContinuation]:
    device, known, forward = input_device(model), batch.num_known, forward_pass_of(model)
    fed = [(*item.context, *item.continuation)[known:-1] for item in items]
    ids_RT, mask_RT = right_padded(fed, device)
    positions = [
        (row, len(item.context) - known - 1 + i, token)
        for row, item in enumerate(items)
        for i, token in enumerate(item.continuation)
    ]
    row_L, column_L, token_L = (torch.tensor(part, device=device) for part in zip(*positions, strict=True))
    prompt_length_R = torch.tensor([len(item.context) - known for item in items], device=device)
    inputs = batch.inputs(ids_RT, mask_RT)
    with RowEdits(model, batch.deltas).prefill(mask_RT, prompt_length_R):
        states_LD = forward.states_at(model, inputs, row_L, column_L, use_cache=batch.prefix is not None)
    logprob_L, argmax_L = (part.tolist() for part in log_likelihoods(forward.head(model), states_LD, token_L))
    answers, start = [], 0
    for item in items:
        stop = start + len(item.continuation)
        answers.append(item.answer(logprob_L[start:stop], argmax_L[start:stop]))
        start = stop
    return answers
