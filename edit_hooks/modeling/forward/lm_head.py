"""The LM head: logits of some tokens, and their vector-Jacobian products.

Losses over the vocabulary (:mod:`edit_hooks.modeling.forward.vocab_loss`) read the head one slice at a time, so that
the logits of all tokens never exist at once. Where the head is a plain linear map, a slice of logits is a product with
a slice of its weight; elsewhere (quantized, offloaded or hooked heads) the whole vocabulary is one slice.

Shapes: N states, d residual width, V vocabulary, W selected tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from edit_hooks.modeling.architectures import decoder_of, head_of, input_device, map_shape
from edit_hooks.modeling.hooks import forward_replaced

# A slice of the vocabulary, W token ids, or token ids [N, W] of each state's own.
TokenSelection = slice | torch.Tensor


WHOLE_VOCAB = slice(None)


# What no operation behind a head leaves unchanged: scales move the first ones, soft caps the last ones.
PROBE_LOGITS = (0.5, -1.0, 3.0, -60.0, 1000.0, -10000.0)


MIN_SLICE_WIDTH, SLICE_STEP = 2048, 512  # tokens; narrower slices cost overhead, and GEMMs like round widths


# Pulls weights [M, W] of the logits of M states, given by their indices [M], back to these states, [M, d]: the sum over
# tokens of weight times the gradient of the logit.
VocabVJP = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def default_max_logits(device: torch.device) -> int:
    """Logits to hold at once: what fits a CPU's cache, or what keeps a GPU busy."""
    return 2**26 if device.type == "cuda" else 2**14


class LMHead(Protocol):
    """Logits of final hidden states."""

    def logits(self, states_ND: torch.Tensor, tokens: TokenSelection) -> torch.Tensor:
        """Logits [N, W] of the selected tokens; differentiable."""

    def logits_with_vjp(self, states_ND: torch.Tensor, tokens: TokenSelection) -> tuple[torch.Tensor, VocabVJP]:
        """Logits [N, W] without a graph, and their vector-Jacobian product.

        Args:
            tokens: with ids of each state's own, the product takes the weights of all states, in their order.
        """

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        """Partition of the vocabulary into slices.

        ``num_states`` states have about ``max_logits`` logits in one slice.
        """


class _DecoderOutput(BaseModelOutputWithPastAndCrossAttentions):
    """States as a decoder returns them; what else decoders return (router logits, caches) is ``None``."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ModelHead:
    """The head of a model, and the elementwise operations behind it."""

    def __init__(self, model: Any) -> None:
        module: Any = head_of(model)
        self.model, self.module = model, module
        self.vocab_size = map_shape(module)[0]

    @property
    def is_plain(self) -> bool:
        """Whether the head is a linear map whose weight can be sliced.

        It is not where the weight is quantized or offloaded, or the module hooked.
        """
        module = self.module
        return (
            type(module).forward is nn.Linear.forward
            and module.weight.device.type != "meta"
            and not module._forward_hooks
            and not module._forward_pre_hooks
            and self.reads_states
        )

    @functools.cached_property
    def reads_states(self) -> bool:
        """Whether the head reads the decoder's output unchanged; some models scale it first."""
        states_1D = torch.arange(1.0, map_shape(self.module)[1] + 1)[None].to(self.module.weight)
        read: list[torch.Tensor] = []

        def record(states_11D: torch.Tensor) -> torch.Tensor:
            read.append(states_11D)
            return states_11D.new_zeros(*states_11D.shape[:-1], self.vocab_size)

        with forward_replaced(self.module, record):
            self._run_after_decoder(states_1D)
        return read[0].shape[-1] == states_1D.shape[1] and torch.equal(read[0].flatten(0, -2).to(states_1D), states_1D)

    @functools.cached_property
    def ends_with_projection(self) -> bool:
        """Whether the model returns the head's output unchanged.

        Tested with a few numbers, which then pass through in place, or as a copy where accelerate moves the output to
        the device of the input.
        """
        probe_1W = torch.tensor([PROBE_LOGITS]).to(self.module.weight)
        returned_1W = self._run_after_head(probe_1W)
        if returned_1W.device != probe_1W.device:
            return torch.equal(returned_1W.to(probe_1W), probe_1W)
        return returned_1W.data_ptr() == probe_1W.data_ptr()

    def logits(self, states_ND: torch.Tensor, tokens: TokenSelection) -> torch.Tensor:
        if not self.is_plain or (isinstance(tokens, slice) and tokens == WHOLE_VOCAB):
            return select_tokens(self._run_after_decoder(states_ND), tokens)
        return self._finish(self._project(states_ND, tokens))

    def logits_with_vjp(self, states_ND: torch.Tensor, tokens: TokenSelection) -> tuple[torch.Tensor, VocabVJP]:
        if not self.is_plain:
            return _vjp_through_autograd(self.logits, states_ND, tokens)
        weight_WD = self.module.weight[self._on_head_device(tokens)]
        with torch.no_grad():
            projected_NW = self._project(states_ND, tokens)
        with torch.enable_grad():
            logits_NW = self._finish(projected_NW.requires_grad_(True))
        slope_NW = None  # of the elementwise operations behind the head
        if not self.ends_with_projection:
            (slope_NW,) = torch.autograd.grad(logits_NW, projected_NW, torch.ones_like(logits_NW))

        def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
            weights_MW = weights_MW.to(weight_WD.dtype)
            weights_MW = weights_MW if slope_NW is None else weights_MW * slope_NW[state_M]
            if weight_WD.ndim == 3:  # rows of each state's own
                return (weights_MW[:, :, None] * weight_WD).sum(1)
            return weights_MW @ weight_WD

        return logits_NW.detach(), vjp

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        if not self.is_plain:
            return [WHOLE_VOCAB]
        width = max(MIN_SLICE_WIDTH, max_logits // max(num_states, 1) // SLICE_STEP * SLICE_STEP)
        if width >= self.vocab_size:
            return [WHOLE_VOCAB]
        return [slice(start, min(start + width, self.vocab_size)) for start in range(0, self.vocab_size, width)]

    def _run_after_decoder(self, states_ND: torch.Tensor) -> torch.Tensor:
        """Run the head and everything behind it on decoder outputs; logits [N, V]."""
        decoder_output = _DecoderOutput(last_hidden_state=states_ND[None])
        unread_ids_11 = torch.zeros(1, 1, dtype=torch.long, device=input_device(self.model))
        with forward_replaced(decoder_of(self.model), lambda *_args, **_kwargs: decoder_output):
            # squeeze is a view both ways; the backward pass of an index would fill a tensor of logits with zeros
            return self.model(input_ids=unread_ids_11).logits.squeeze(0)

    def _run_after_head(self, projected_NW: torch.Tensor) -> torch.Tensor:
        """Run only the elementwise operations behind the head."""
        with forward_replaced(self.module, lambda _states: projected_NW[None]):
            return self._run_after_decoder(projected_NW)

    def _finish(self, projected_NW: torch.Tensor) -> torch.Tensor:
        return projected_NW if self.ends_with_projection else self._run_after_head(projected_NW).to(projected_NW.device)

    def _on_head_device(self, tokens: TokenSelection) -> TokenSelection:
        return tokens.to(self.module.weight.device) if isinstance(tokens, torch.Tensor) else tokens

    def _project(self, states_ND: torch.Tensor, tokens: TokenSelection) -> torch.Tensor:
        """The head's output for the selected tokens, [N, W]."""
        weight, bias = self.module.weight, self.module.bias
        states_ND, tokens = states_ND.to(weight.device), self._on_head_device(tokens)
        if isinstance(tokens, torch.Tensor) and tokens.ndim == 2:
            projected_NW = (weight[tokens] @ states_ND[:, :, None])[..., 0]
        else:
            # With the weight on the left, a CPU is several times faster for a few states. A single state is doubled: it
            # would take the matrix-vector product, which runs on one thread. It is copied: a row of stride 0 takes a
            # kernel that is five times slower.
            columns_DN = states_ND.repeat(2, 1).T if len(states_ND) == 1 else states_ND.T
            projected_NW = (weight[tokens] @ columns_DN).T[: len(states_ND)]
        return projected_NW if bias is None else projected_NW + bias[tokens]


def _vjp_through_autograd(
    logits_of: Callable[[torch.Tensor, TokenSelection], torch.Tensor],
    states_ND: torch.Tensor,
    tokens: TokenSelection,
) -> tuple[torch.Tensor, VocabVJP]:
    """Logits and their VJP for an arbitrary head.

    The VJP repeats the forward pass with a graph.
    """

    def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
        states_MD = states_ND[state_M.to(states_ND.device)].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_MW = logits_of(states_MD, tokens)
        (gradient_MD,) = torch.autograd.grad(logits_MW, states_MD, weights_MW.to(logits_MW.dtype))
        return gradient_MD

    with torch.no_grad():
        return logits_of(states_ND, tokens), vjp


class PrecomputedLogits:
    """The identity as a head, for states that are logits already (d = V)."""

    def logits(self, states_NV: torch.Tensor, tokens: TokenSelection) -> torch.Tensor:
        return select_tokens(states_NV, tokens).clone()

    def logits_with_vjp(self, states_NV: torch.Tensor, tokens: TokenSelection) -> tuple[torch.Tensor, VocabVJP]:
        def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
            gradient_MV = weights_MW.new_zeros(len(state_M), states_NV.shape[1])
            if isinstance(tokens, torch.Tensor) and tokens.ndim == 2:
                return gradient_MV.scatter_add_(1, tokens.to(gradient_MV.device), weights_MW)
            gradient_MV[:, tokens] = weights_MW
            return gradient_MV

        return self.logits(states_NV, tokens), vjp

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        return [WHOLE_VOCAB]


def select_tokens(logits_NV: torch.Tensor, tokens: TokenSelection) -> torch.Tensor:
    """Logits [N, W] of the selected tokens; no copy for the whole vocabulary."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.to(logits_NV.device)
        return logits_NV.gather(1, tokens) if tokens.ndim == 2 else logits_NV[:, tokens]
    return logits_NV if tokens == WHOLE_VOCAB else logits_NV[:, tokens]
