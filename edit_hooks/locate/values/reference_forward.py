"""Value forwards without shortcuts, as the released loops run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from edit_hooks.locate.values.value_batch import (
    ReadActivations,
    Site,
    SiteActivations,
    ValueBatch,
    recorded_activations,
    site_module,
)
from edit_hooks.modeling.architectures import architecture_of, unwrapped
from edit_hooks.modeling.forward.embedding_noise import noisy_embeddings
from edit_hooks.modeling.forward.lm_head import PrecomputedLogits
from edit_hooks.modeling.hooks import hooks, on_output
from edit_hooks.modeling.tensors import at_least_float32


class ReferenceForward:
    """Full forward passes: slow and obviously right.

    A :class:`~edit_hooks.locate.values.value_batch.ValueForward`: whole sequences run through the whole model.

    Shapes: R rows, T columns, L labels, E edits, d residual width, V vocabulary.
    """

    def __init__(self, model: nn.Module, batch: ValueBatch, layer: int, site: Site) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.lm_head = PrecomputedLogits()
        self.activations = self._read_activations()

    @torch.no_grad()
    def _read_activations(self) -> SiteActivations:
        batch = self.batch
        with noisy_embeddings(self.model, batch.noise_RTD), self._recording(batch.positions_R) as read:
            self.model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False)
        return read()

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        """Hook: which activations are recorded."""
        return recorded_activations(self.model, self.arch, column_R, self.layer, self.site)

    def _adding(self, delta_ED: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Hook: where the offsets are added."""
        return hooks(on_output(site_module(self.model, self.arch, self.layer, self.site), self._plus(delta_ED)))

    def _plus(self, delta_ED: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Output hook that adds the offset of each row's edit at its fact token.

        Out of place, so that gradients reach the offsets.
        """
        batch = self.batch

        def add(hidden_RTD: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(len(hidden_RTD), device=hidden_RTD.device)
            columns = batch.positions_R.to(hidden_RTD.device)
            offset_RD = delta_ED[batch.edit_R].to(hidden_RTD.device, hidden_RTD.dtype)
            if batch.held_RTD is not None:
                hidden_RTD = hidden_RTD + batch.held_RTD.to(hidden_RTD)
            return hidden_RTD + torch.zeros_like(hidden_RTD).index_put((rows, columns), offset_RD)

        return add

    def hidden_at_labels(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [L + E, V] at the label positions, then the KL positions."""
        batch = self.batch
        with noisy_embeddings(self.model, batch.noise_RTD), self._adding(delta_ED):
            logits_RTV = self.model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False).logits
        # Normalized at every position, as the released loops do; the loss normalizes again, which changes nothing.
        log_p_RTV = at_least_float32(logits_RTV).log_softmax(-1)
        rows = torch.cat([batch.label_row_L, batch.kl_row_E])
        return log_p_RTV[rows, torch.cat([batch.label_column_L, batch.positions_R[batch.kl_row_E]])]

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        self.batch = self.batch.select(keep_E)
