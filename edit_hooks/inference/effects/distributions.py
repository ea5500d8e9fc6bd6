"""Next-token distributions after prompts, optionally with noise on their embeddings, each under its own edit.

Shapes: R rows, T tokens, d embedding width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.items import Limits
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.forward.embedding_noise import noisy_embeddings
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB
from edit_hooks.modeling.tensors import at_least_float32


class NoisyPrompt(NamedTuple):
    """A prompt as token ids, and the noise [T, d] on its input embeddings; ``None`` for none."""

    ids: tuple[int, ...]
    noise_TD: torch.Tensor | None = None


def next_token_log_probs(
    model: nn.Module, jobs: Sequence[tuple[NoisyPrompt, Delta | None]], limits: Limits
) -> list[torch.Tensor]:
    """Log-probabilities [V] of the token after each prompt under its edit, on the CPU, in the order of the jobs."""
    inner = unwrapped(model)
    found: dict[int, torch.Tensor] = {}

    def run(batch: Batch) -> None:
        log_probs = batch_log_probs(inner, [jobs[index][0] for index in batch.indices], batch.deltas).cpu()
        found.update(zip(batch.indices, log_probs, strict=True))

    run_in_batches(model, [delta for _, delta in jobs], [len(prompt.ids) for prompt, _ in jobs], limits, run)
    return [found[index] for index in range(len(jobs))]


@torch.no_grad()
def batch_log_probs(model: nn.Module, prompts: Sequence[NoisyPrompt], deltas: Sequence[Delta | None]) -> torch.Tensor:
    """Log-probabilities [R, V] of the token after each prompt of a batch, whose edits act per row."""
    device, forward = input_device(model), forward_pass_of(model)
    ids_RT, mask_RT = right_padded([prompt.ids for prompt in prompts], device)
    length_R = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    with noisy_embeddings(model, _noise(prompts, ids_RT)), RowEdits(model, deltas).prefill(mask_RT, length_R):
        inputs, row_R = {"input_ids": ids_RT, "attention_mask": mask_RT}, torch.arange(len(prompts), device=device)
        last_RD = forward.states_at(model, inputs, row_R, length_R - 1, use_cache=False)
    return at_least_float32(forward.head(model).logits(last_RD, WHOLE_VOCAB)).log_softmax(1)


def _noise(prompts: Sequence[NoisyPrompt], ids_RT: torch.Tensor) -> torch.Tensor | None:
    """The rows' noise, padded on the right, [R, T, d]; ``None`` if no row has any."""
    widths = [prompt.noise_TD.shape[1] for prompt in prompts if prompt.noise_TD is not None]
    if not widths:
        return None
    noise_RTD = torch.zeros(*ids_RT.shape, widths[0], device=ids_RT.device)
    for row, prompt in enumerate(prompts):
        if prompt.noise_TD is not None:
            noise_RTD[row, : len(prompt.ids)] = prompt.noise_TD.to(ids_RT.device)
    return noise_RTD
