"""Clean, corrupted and restored forward passes of causal tracing.

Restoring a block's output changes only the blocks above it, restoring a window those from its first block on. All
blocks below return their output of the corrupted run. Rows of different facts, tokens and draws share a pass.

Shapes: F facts, N draws, T tokens, C cells (a fact and one of its tokens), R rows of a pass, d residual width,
V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from edit_hooks.modeling.architectures import architecture_of, head_of, input_device, num_layers
from edit_hooks.modeling.forward.embedding_noise import gaussian_noise, noise_at, noisy_embeddings
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import (
    CachedOutput,
    hooks,
    on_input,
    on_output,
    outputs_replaced,
    record_output,
    select_positions,
)
from edit_hooks.modeling.tensors import at_least_float32

Kind = Literal["state", "mlp", "attention"]


KINDS: tuple[Kind, ...] = ("state", "mlp", "attention")


class TracedFact(NamedTuple):
    """A fact as token ids.

    Attributes:
        ids: the prompt. first, end: the subject's tokens [first, end). answer: first token of the answer.
        noise: on the subject's tokens [N, end - first, d]; ``None``: drawn.
    """

    key: str
    ids: tuple[int, ...]
    first: int
    end: int
    answer: int
    noise: torch.Tensor | None = None


class TracedToken(NamedTuple):
    """One token of one fact, as indices into a batch."""

    fact: int
    token: int


def subject_noise(samples: int, num_tokens: int, width: int, std: float, seed: int) -> torch.Tensor:
    """Noise draws [N, subject tokens, d], float32 on the CPU.

    They are the same for all facts with as many subject tokens.
    """
    return gaussian_noise((samples, num_tokens, width), std, torch.Generator().manual_seed(seed))


def last_logits(model: Any, ids_RT: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] at the last tokens of right-padded prompts.

    Nothing is masked: by causality no prompt sees its padding, and a masked row of a sliding window would be a softmax
    over nothing.
    """
    with hooks(on_input(head_of(model), select_positions(torch.arange(len(ids_RT)), last_R))):
        return model(input_ids=ids_RT, attention_mask=torch.ones_like(ids_RT), use_cache=False).logits[0]


class RestoredRuns:
    """All runs over the prompts of a few facts.

    Attributes:
        clean_F: probabilities of the answers on the plain prompts, float64. corrupted_FN: under noise on the subject.
    """

    def __init__(self, model: Any, facts: Sequence[TracedFact], *, samples: int, noise_std: float, seed: int) -> None:
        self.model, self.samples = model, samples
        self.depth = num_layers(model)
        arch = architecture_of(model)
        names: dict[Kind, Callable[[int], str]] = {
            "state": arch.block_name,
            "mlp": arch.mlp_name,
            "attention": arch.attention_name,
        }
        self.modules = {
            kind: [model.get_submodule(names[kind](layer)) for layer in range(self.depth)] for kind in KINDS
        }
        self.ids_FT, mask_FT = right_padded([fact.ids for fact in facts], input_device(model))
        self.last_F = mask_FT.sum(1) - 1
        self.answer_F = torch.tensor([fact.answer for fact in facts], device=self.ids_FT.device)
        width = model.get_input_embeddings().weight.shape[1]
        # Row f N + n of the corrupted run is draw n of fact f.
        self.noise_RTD = torch.cat(
            [
                noise_at(
                    range(fact.first, fact.end),
                    self.ids_FT.shape[1],
                    subject_noise(samples, fact.end - fact.first, width, noise_std, seed)
                    if fact.noise is None
                    else fact.noise,
                )
                for fact in facts
            ]
        ).to(self.ids_FT.device)
        self.clean_outputs: dict[tuple[Kind, int], CachedOutput] = {}
        self.corrupted_states: dict[int, CachedOutput] = {}
        self.clean_F = self._run_clean()
        self.corrupted_FN = self._run_corrupted().view(len(facts), samples)

    def _run_clean(self) -> torch.Tensor:
        """Run the plain prompts and store all outputs; the answers' probabilities [F]."""
        reads = [
            record_output(self.clean_outputs, (kind, layer), self.modules[kind][layer])
            for kind in KINDS
            for layer in range(self.depth)
        ]
        with hooks(*reads):
            return self._answer_probabilities(torch.arange(len(self.ids_FT), device=self.ids_FT.device))

    def _run_corrupted(self) -> torch.Tensor:
        """Run the prompts under noise and store the block outputs.

        Returns the answers' probabilities [F N].
        """
        reads = [
            record_output(self.corrupted_states, layer, block) for layer, block in enumerate(self.modules["state"])
        ]
        fact_R = torch.arange(len(self.ids_FT), device=self.ids_FT.device).repeat_interleave(self.samples)
        with noisy_embeddings(self.model, self.noise_RTD), hooks(*reads):
            return self._answer_probabilities(fact_R)

    def restored(self, kind: Kind, layer: int, window: int, cells: Sequence[TracedToken]) -> torch.Tensor:
        """Probabilities [C, N] of the answers with clean values at each cell's token.

        Args:
            kind: ``state`` restores the output of block ``layer``, the others the modules of a window around it.
            window: number of blocks in the window.
        """
        device = self.ids_FT.device
        fact_R = torch.tensor([cell.fact for cell in cells], device=device).repeat_interleave(self.samples)
        token_R = torch.tensor([cell.token for cell in cells], device=device).repeat_interleave(self.samples)
        corrupted_R = fact_R * self.samples + torch.arange(self.samples, device=device).repeat(len(cells))
        clean = self.clean_outputs

        def restorer(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return functools.partial(_restore, clean_FTD=clean[kind, number].hidden, fact_R=fact_R, token_R=token_R)

        with contextlib.ExitStack() as stack:
            if kind == "state":
                stack.enter_context(self._blocks_skipped(layer + 1, corrupted_R, restorer(layer)))
            else:
                window_layers = self._window(layer, window)
                stack.enter_context(self._blocks_skipped(window_layers[0], corrupted_R))
                for number in window_layers:
                    stack.enter_context(hooks(on_output(self.modules[kind][number], restorer(number))))
            return self._answer_probabilities(fact_R).view(len(cells), self.samples)

    def _blocks_skipped(
        self,
        count: int,
        corrupted_R: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda hidden_RTD: hidden_RTD,
    ) -> contextlib.AbstractContextManager[None]:
        """Let the first ``count`` blocks return rows of the corrupted run.

        They do not run. ``change`` is applied to the hidden states.
        """
        if count == 0:
            return noisy_embeddings(self.model, self.noise_RTD[corrupted_R])
        state = self.corrupted_states[count - 1]
        hidden_RTD = change(state.hidden[corrupted_R.to(state.hidden.device)])
        return outputs_replaced(self.modules["state"][:count], state._replace(hidden=hidden_RTD).as_output())

    def _window(self, layer: int, size: int) -> list[int]:
        """Blocks restored together.

        Half of the window lies below the layer, the rest is the layer and those above.
        """
        start = layer - size // 2
        return list(range(max(0, start), min(self.depth, start + size)))

    def _answer_probabilities(self, fact_R: torch.Tensor) -> torch.Tensor:
        """Probabilities [R] of the answers under the active hooks, float64 on the CPU."""
        logits_RV = last_logits(self.model, self.ids_FT[fact_R], self.last_F[fact_R])
        answer_R = self.answer_F[fact_R].to(logits_RV.device)
        return at_least_float32(logits_RV).softmax(1).gather(1, answer_R[:, None])[:, 0].double().cpu()


def _restore(
    hidden_RTD: torch.Tensor, clean_FTD: torch.Tensor, fact_R: torch.Tensor, token_R: torch.Tensor
) -> torch.Tensor:
    """A copy of hidden states with the clean value at one token per row."""
    device = hidden_RTD.device
    restored_RTD, token_R = hidden_RTD.clone(), token_R.to(device)
    rows = torch.arange(len(hidden_RTD), device=device)
    restored_RTD[rows, token_R] = clean_FTD.to(device)[fact_R.to(device), token_R]
    return restored_RTD
