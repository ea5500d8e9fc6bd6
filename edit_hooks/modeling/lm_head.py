"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from edit_hooks.modeling.architectures import decoder_of, head_of, input_device
from edit_hooks.modeling.hooks import forward_replaced

ALL = slice(None)


FEWEST_WORDS, WORDS_STEP = 2048, 512  # below that the overhead of a slice shows; matrix products like round widths


ROWS_AT_ONCE = 512  # of one batch of answers


def logits_at_once(device: torch.device) -> int:
    """About how many logits to hold: what stays in a CPU's cache, what keeps a GPU busy."""
    return 2**26 if device.type == "cuda" else 2**14


# Given weights [M, W] of the words of M states and the numbers [M] of these states, sums over words of weight times the
# logit's gradient, [M, d].
VocabVJP = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LMHead(Protocol):
    """Gives logits of states."""

    def logits(self, states_ND: torch.Tensor, words: slice | torch.Tensor) -> torch.Tensor:
        """Logits of some words, [N, W]: a slice of the vocabulary, W numbers, or numbers of each state's own [N, W]."""

    def logits_with_vjp(self, states_ND: torch.Tensor, words: slice | torch.Tensor) -> tuple[torch.Tensor, VocabVJP]:
        """Logits [N, W] of a slice or of W words, without a graph, and how to pull weights of them back to states."""

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        """The vocabulary in parts, of which ``num_states`` states have about ``max_logits`` logits."""


class ModelHead:
    """The model's vocabulary projection and whatever it does after it, which is elementwise (soft-capping, scaling)."""

    def __init__(self, model: Any) -> None:
        module: Any = head_of(model)
        self.model, self.module = model, module
        self.num_words = int(module.weight.shape[0])
        self.ends_with_projection: bool | None = None  # known once it has been seen

    @property
    def is_plain(self) -> bool:
        """Whether words can be picked from the weight: not where it is quantized, offloaded or hooked."""
        module = self.module
        return (
            type(module).forward is nn.Linear.forward
            and module.weight.device.type != "meta"
            and not module._forward_hooks
            and not module._forward_pre_hooks
        )

    def logits(self, states_ND: torch.Tensor, words: slice | torch.Tensor) -> torch.Tensor:
        if not self.is_plain or (isinstance(words, slice) and words == ALL):
            return select_words(self._after(states_ND), words)
        return self._from_projected(self._projected(states_ND, words))

    def logits_with_vjp(self, states_ND: torch.Tensor, words: slice | torch.Tensor) -> tuple[torch.Tensor, VocabVJP]:
        if not self.is_plain:
            return _through_autograd(self.logits, states_ND, words)
        weight_WD = self.module.weight[self._at_head(words)]
        with torch.no_grad():
            projected_NW = self._projected(states_ND, words)
        with torch.enable_grad():
            logits_NW = self._from_projected(projected_NW.requires_grad_(True))
        slope_NW = None
        if not self.ends_with_projection:
            (slope_NW,) = torch.autograd.grad(logits_NW, projected_NW, torch.ones_like(logits_NW))

        def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
            weights_MW = weights_MW.to(weight_WD.dtype)
            return (weights_MW if slope_NW is None else weights_MW * slope_NW[state_M]) @ weight_WD

        return logits_NW.detach(), vjp

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        if not self.is_plain:
            return [ALL]
        width = max(FEWEST_WORDS, max_logits // max(num_states, 1) // WORDS_STEP * WORDS_STEP)
        if width >= self.num_words:
            return [ALL]
        return [slice(a, min(a + width, self.num_words)) for a in range(0, self.num_words, width)]

    def _after(self, states_ND: torch.Tensor) -> torch.Tensor:
        """What the model makes of states that its decoder would have given."""
        done = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states_ND[None])
        some_ids_11 = torch.zeros(1, 1, dtype=torch.long, device=input_device(self.model))
        with forward_replaced(decoder_of(self.model), lambda *_args, **_kwargs: done):
            # squeeze is a view both ways; the backward pass of an index would fill a tensor of logits with zeros
            return self.model(input_ids=some_ids_11).logits.squeeze(0)

    def _from_projected(self, projected_NW: torch.Tensor) -> torch.Tensor:
        """What the model makes of what its head would have given."""
        if self.ends_with_projection:
            return projected_NW
        with forward_replaced(self.module, lambda _states: projected_NW[None]):
            logits_NW = self._after(projected_NW)
        self.ends_with_projection = logits_NW.data_ptr() == projected_NW.data_ptr()
        return logits_NW

    def _at_head(self, words: slice | torch.Tensor) -> slice | torch.Tensor:
        return words.to(self.module.weight.device) if isinstance(words, torch.Tensor) else words

    def _projected(self, states_ND: torch.Tensor, words: slice | torch.Tensor) -> torch.Tensor:
        weight, bias = self.module.weight, self.module.bias
        states_ND, words = states_ND.to(weight.device), self._at_head(words)
        if isinstance(words, torch.Tensor) and words.ndim == 2:
            found_NW = (weight[words] @ states_ND[:, :, None])[..., 0]
        else:
            # With the weight on the left a CPU is several times as fast for a few states; for one alone it would take
            # the matrix-vector product, which runs on one thread.
            columns_DN = states_ND.expand(2, -1).T if len(states_ND) == 1 else states_ND.T
            found_NW = (weight[words] @ columns_DN).T[: len(states_ND)]
        return found_NW if bias is None else found_NW + bias[words]


def _through_autograd(
    logits_of: Callable[[torch.Tensor, slice | torch.Tensor], torch.Tensor],
    states_ND: torch.Tensor,
    words: slice | torch.Tensor,
) -> tuple[torch.Tensor, VocabVJP]:
    """See :meth:`LMHead.logits_with_vjp`, for logits about which nothing is known."""

    def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
        states_MD = states_ND[state_M.to(states_ND.device)].detach().requires_grad_(True)
        with torch.enable_grad():
            logits_MW = logits_of(states_MD, words)
        (pulled_MD,) = torch.autograd.grad(logits_MW, states_MD, weights_MW.to(logits_MW.dtype))
        return pulled_MD

    with torch.no_grad():
        return logits_of(states_ND, words), vjp


class PrecomputedLogits:
    """For states that are logits already."""

    def logits(self, states_NV: torch.Tensor, words: slice | torch.Tensor) -> torch.Tensor:
        return select_words(states_NV, words).clone()

    def logits_with_vjp(self, states_NV: torch.Tensor, words: slice | torch.Tensor) -> tuple[torch.Tensor, VocabVJP]:
        def vjp(weights_MW: torch.Tensor, state_M: torch.Tensor) -> torch.Tensor:
            pulled_MV = torch.zeros(len(state_M), states_NV.shape[1]).to(weights_MW)
            pulled_MV[:, words] = weights_MW
            return pulled_MV

        return self.logits(states_NV, words), vjp

    def slices(self, num_states: int, max_logits: int) -> list[slice]:
        return [ALL]


def select_words(logits_NV: torch.Tensor, words: slice | torch.Tensor) -> torch.Tensor:
    """Some words' logits out of all of them; see :class:`LMHead`."""
    if isinstance(words, torch.Tensor):
        words = words.to(logits_NV.device)
        return logits_NV.gather(1, words) if words.ndim == 2 else logits_NV[:, words]
    return logits_NV if words == ALL else logits_NV[:, words]
