"""Value forwards that recompute only what an offset can change.

The offset enters at one layer and one token. By causality it changes nothing before that token and nothing below that
layer, so the prefix (as keys and values) and the suffix up to the offset are computed once and cached; a step runs the
suffix through the upper blocks, and the head at the label positions only. The numbers are those of
:class:`~edit_hooks.locate.values.reference_forward.ReferenceForward` up to rounding. Proof and list of caches:
docs/explain/design/suffix-only-exactness.md.

Shapes: R rows, E edits, G rows of a group, S suffix columns, C prefix and suffix columns, L labels, d residual width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from edit_hooks.locate.values.value_batch import (
    ReadActivations,
    Site,
    SiteActivations,
    ValueBatch,
    recorded_activations,
    site_module,
)
from edit_hooks.modeling.architectures import architecture_of, decoder_of, unwrapped
from edit_hooks.modeling.device.recording import records
from edit_hooks.modeling.device.run_ahead import runs_ahead
from edit_hooks.modeling.forward import prefix_attention
from edit_hooks.modeling.forward.embedding_noise import noisy_embeddings
from edit_hooks.modeling.forward.kv_cache import CACHE, group_by_length, max_padding
from edit_hooks.modeling.forward.lm_head import ModelHead
from edit_hooks.modeling.forward.prefix_cache import KeysValues, PrefixCache, compute_prefix_cache
from edit_hooks.modeling.hooks import CachedOutput, hooks, on_output, outputs_replaced, record_output, stop_after

RECORDED = "value optimization"  # the kind of its steps
# Of a step that is recorded. Larger ones keep an H100 busy: 16 edits of 21 rows take 131 ms recorded, 137 ms not.
RECORDED_TOKENS = 1024
RECORDED_PREFIX = 4096  # tokens in front of them, which a recording keeps: half a gigabyte for Llama 3 8B
SUFFIX_STEP, PREFIX_STEP = 8, 32  # of numbers of columns in buckets


@dataclass(frozen=True)
class CachedModule:
    """A module whose unedited output is cached, and the modules it replaces.

    Attributes:
        source: name of the module whose output is cached. replaces: names of the modules that return it.
        takes_offset: whether the offset is added to it.
    """

    source: str
    replaces: tuple[str, ...]
    takes_offset: bool


@dataclass
class RowGroup:
    """Rows of similar suffix length that run together, and their caches.

    Attributes:
        rows_G: their indices in the batch.
        ids_GS, position_ids_GS: the suffix. mask_GC: 1 at tokens of prefix and suffix.
        prefix_layers: keys and values of the prefix per block; empty when no row has one.
        room: columns behind the prefix in these layers, for the suffix; 0 where it is kept apart.
        outputs: per cached module its unedited output [G, S, d].
        noise_GSD: noise on the input embeddings, if any.
    """

    rows_G: torch.Tensor
    ids_GS: torch.Tensor
    position_ids_GS: torch.Tensor
    mask_GC: torch.Tensor
    prefix_layers: list[KeysValues]
    room: int
    outputs: list[CachedOutput]
    noise_GSD: torch.Tensor | None

    def run(self, model: Any) -> torch.Tensor:
        """Run the decoder on the suffix; its last hidden states [G, S, d]."""
        inputs = {"input_ids": self.ids_GS, "attention_mask": self.mask_GC, "position_ids": self.position_ids_GS}
        decoder = decoder_of(model)
        if not self.prefix_layers:
            return decoder(**inputs, use_cache=False).last_hidden_state
        if not prefix_attention.is_supported(model):
            cache = DynamicCache(self.prefix_layers)
            return decoder(**inputs, **{CACHE: cache}, use_cache=True).last_hidden_state
        with prefix_attention.cached_prefix(model, self.prefix_layers, self.room) as cache:
            return decoder(**inputs, **{CACHE: cache}, use_cache=True).last_hidden_state

    def select(self, keep_G: torch.Tensor, new_row_R: torch.Tensor) -> RowGroup:
        """The group with some of its rows, renumbered."""

        def select(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[keep_G.to(tensor.device)]

        return RowGroup(
            rows_G=new_row_R[select(self.rows_G)],
            ids_GS=select(self.ids_GS),
            position_ids_GS=select(self.position_ids_GS),
            mask_GC=select(self.mask_GC),
            prefix_layers=[(select(keys), select(values)) for keys, values in self.prefix_layers],
            room=self.room,
            outputs=[output._replace(hidden=select(output.hidden)) for output in self.outputs],
            noise_GSD=None if self.noise_GSD is None else select(self.noise_GSD),
        )


class SuffixForward:
    """Suffix-only forward passes.

    A :class:`~edit_hooks.locate.values.value_batch.ValueForward`.

    Args:
        may_be_recorded: the steps are, if they wait for launches; then shapes are rounded up, so that recorded steps of
            other batches can be replayed (``in_buckets``).
    """

    def __init__(
        self, model: nn.Module, batch: ValueBatch, layer: int, site: Site, *, may_be_recorded: bool = False
    ) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.lm_head = ModelHead(self.model)
        self.in_buckets = may_be_recorded and self._is_recorded()
        self.cached_modules = self._cached_modules()
        self.groups, self.activations = self._prepare()

    def _is_recorded(self) -> bool:
        """Whether steps of the model are recorded, and those of this batch wait for launches."""
        device = self.batch.ids_RT.device
        if self.batch.noise_RTD is not None or not runs_ahead(device) or not records(self.model, device, RECORDED):
            return False
        num_rows, prefix = len(self.batch.ids_RT), int(self.batch.positions_R.max())
        suffix = int((self.batch.mask_RT.sum(1) - self.batch.positions_R).max())
        is_small = num_rows * suffix <= RECORDED_TOKENS and num_rows * prefix <= RECORDED_PREFIX
        return is_small and prefix > 0 and prefix_attention.is_supported(self.model)

    def _cached_modules(self) -> list[CachedModule]:
        """Hook: the modules that do not depend on the offset.

        They are all blocks below and the edited block up to the site.
        """
        block, layer = self.arch.block_name, self.layer
        if self.site == "block":
            return [CachedModule(block(layer), tuple(block(number) for number in range(layer + 1)), True)]
        mlp = self.arch.mlp_name(layer)
        modules = [CachedModule(mlp, (mlp,), True)]
        if self.arch.has("attention", layer):
            attention = self.arch.attention_name(layer)
            if self.arch.changes_attention(layer):
                modules = [CachedModule(attention, (attention,), True)]
            else:
                modules.insert(0, CachedModule(attention, (attention,), False))
        if layer > 0:
            modules.append(CachedModule(block(layer - 1), tuple(block(number) for number in range(layer)), False))
        return modules

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        """Hook: which activations are recorded."""
        return recorded_activations(self.model, self.arch, column_R, self.layer, self.site)

    @torch.no_grad()
    def _prepare(self) -> tuple[list[RowGroup], SiteActivations]:
        """Run the unedited model: the prefixes, then the suffixes up to the edited block."""
        batch = self.batch
        rows = zip(batch.ids_RT.tolist(), batch.positions_R.tolist(), strict=True)
        with noisy_embeddings(self.model, batch.noise_RTD), self._held_added():
            # Under noise, equal tokens have different embeddings, so no prefix is shared.
            prefix = compute_prefix_cache(
                self.model,
                [ids[:position] for ids, position in rows],
                share=batch.noise_RTD is None and batch.held_RTD is None,
            )
        suffix_length_R = batch.mask_RT.sum(1) - batch.positions_R
        suffix_length_R[batch.kl_row_E] = 1  # the KL term is read at the fact token; later tokens have no effect
        groups, activations = [], []
        lengths = suffix_length_R.tolist()
        padding = sum(lengths) * len(lengths) if self.in_buckets else max_padding(suffix_length_R.device, lengths)
        for indices in group_by_length(lengths, padding):
            rows_G = torch.tensor(indices, device=suffix_length_R.device)
            group = self._make_group(rows_G, suffix_length_R[rows_G], prefix)
            activations.append(self._fill_caches(group))
            groups.append(group)
        return groups, _in_batch_order(groups, activations)

    def _held_added(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which the offsets that stay are added; they are before the fact tokens, so prefixes hold them."""
        held_RTD = self.batch.held_RTD
        if held_RTD is None:
            return contextlib.nullcontext()

        def add(hidden_RPD: torch.Tensor) -> torch.Tensor:
            return hidden_RPD + held_RTD[:, : hidden_RPD.shape[1]].to(hidden_RPD)

        return hooks(on_output(site_module(self.model, self.arch, self.layer, self.site), add))

    def _make_group(self, rows_G: torch.Tensor, length_G: torch.Tensor, prefix: PrefixCache | None) -> RowGroup:
        """Suffixes and prefixes of some rows; caches of module outputs are empty."""
        batch = self.batch
        width = int(length_G.max())
        if self.in_buckets:
            width += -width % SUFFIX_STEP
        columns_S = torch.arange(width, device=length_G.device)
        position_ids_GS = (batch.positions_R[rows_G, None] + columns_S).clamp(max=batch.ids_RT.shape[1] - 1)
        mask_GC = (columns_S < length_G[:, None]).long()
        prefix_layers: list[KeysValues] = []
        room = 0
        if prefix is not None and prefix.length_R[rows_G].any():
            prefix = prefix.select(rows_G)
            if self.in_buckets:
                prefix = prefix.widened(-prefix.width % PREFIX_STEP)
            prefix_layers = prefix.layers
            if runs_ahead(length_G.device) and prefix_attention.is_supported(self.model):
                room = len(columns_S)
                prefix_layers = prefix_attention.with_room(prefix_layers, room)
            mask_GC = torch.cat([prefix.mask_RP, mask_GC], 1)
        return RowGroup(
            rows_G=rows_G,
            ids_GS=batch.ids_RT[rows_G].gather(1, position_ids_GS),
            position_ids_GS=position_ids_GS,
            mask_GC=mask_GC,
            prefix_layers=prefix_layers,
            room=room,
            outputs=[],
            noise_GSD=None if batch.noise_RTD is None else _gather_columns(batch.noise_RTD[rows_G], position_ids_GS),
        )

    def _fill_caches(self, group: RowGroup) -> SiteActivations:
        """Run a group up to the edited block and store the cached modules' outputs.

        Returns the activations at the fact tokens.
        """
        outputs: dict[str, CachedOutput] = {}
        submodule = self.model.get_submodule
        sources = [module.source for module in self.cached_modules]
        with (
            self._recording(torch.zeros_like(group.rows_G)) as read_activations,
            hooks(*(record_output(outputs, name, submodule(name)) for name in sources)),
            noisy_embeddings(self.model, group.noise_GSD),
            stop_after(submodule(self.arch.block_name(self.layer))),
        ):
            group.run(self.model)
        group.outputs = [outputs[name] for name in sources]
        if group.prefix_layers:
            # Blocks up to the edited one never read their prefix again. Its width still determines the mask, so these
            # layers keep an empty stub of that width.
            width = group.prefix_layers[0][0].shape[2]
            stub = torch.zeros(len(group.rows_G), 1, width, 1, device=group.rows_G.device)
            group.prefix_layers[: self.layer + 1] = [(stub, stub)] * (self.layer + 1)
        return read_activations()

    def hidden_at_labels(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Inputs of the head [L + E, d] at the label positions, then the KL positions."""
        batch = self.batch
        offset_RD = delta_ED[batch.edit_R]
        hidden = []
        first_token_R = torch.zeros_like(batch.edit_R)  # index of a row's first token among the tokens of all groups
        num_tokens = 0
        for group in self.groups:
            with noisy_embeddings(self.model, group.noise_GSD), self._offsets_added(group, offset_RD[group.rows_G]):
                hidden_GSD = group.run(self.model)
            hidden.append(hidden_GSD.flatten(0, 1))
            num_rows, width = hidden_GSD.shape[:2]
            first_token_R[group.rows_G] = num_tokens + width * torch.arange(num_rows, device=first_token_R.device)
            num_tokens += width * num_rows
        label_column_L = batch.label_column_L - batch.positions_R[batch.label_row_L]
        index_N = torch.cat([first_token_R[batch.label_row_L] + label_column_L, first_token_R[batch.kl_row_E]])
        return torch.cat(hidden)[index_N.to(hidden[0].device)]

    @contextlib.contextmanager
    def _offsets_added(self, group: RowGroup, offset_GD: torch.Tensor) -> Iterator[None]:
        """Hook: cached modules return their output; offsets are added where they enter."""
        with contextlib.ExitStack() as stack:
            for module, cached in zip(self.cached_modules, group.outputs, strict=True):
                if module.takes_offset:
                    cached = cached._replace(hidden=add_at_first(cached.hidden, offset_GD))
                replaced = [self.model.get_submodule(name) for name in module.replaces]
                stack.enter_context(outputs_replaced(replaced, cached.as_output()))
            yield

    def step_tensors(self) -> list[Any]:
        """What :meth:`hidden_at_labels` and the losses read, besides the model."""
        batch = self.batch
        labels = [batch.label_row_L, batch.label_column_L, batch.label_token_L]
        return [batch.positions_R, batch.edit_R, batch.kl_row_E, labels, self.groups]

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        keep_R = keep_E[self.batch.edit_R]
        new_row_R = keep_R.cumsum(0) - 1
        self.batch = self.batch.select(keep_E)
        groups = [group.select(keep_R[group.rows_G], new_row_R) for group in self.groups]
        self.groups = [group for group in groups if len(group.rows_G)]


def add_at_first(hidden_GSD: torch.Tensor, offset_GD: torch.Tensor) -> torch.Tensor:
    """Add offsets to the first column.

    Out of place, so that gradients reach the offsets.
    """
    first_G1D = hidden_GSD[:, :1] + offset_GD.to(hidden_GSD.device, hidden_GSD.dtype)[:, None]
    return torch.cat([first_G1D, hidden_GSD[:, 1:]], 1)


def _in_batch_order(groups: Sequence[RowGroup], activations: Sequence[SiteActivations]) -> SiteActivations:
    """Concatenate the activations of groups and sort them by row."""
    order_R = torch.cat([group.rows_G for group in groups]).argsort()

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))[order_R.to(parts[0].device)]

    return SiteActivations(
        keys_RF=join([part.keys_RF for part in activations]),
        outputs_RD=join([part.outputs_RD for part in activations]),
        site_RD=join([part.site_RD for part in activations]),
    )


def _gather_columns(hidden_RTD: torch.Tensor, column_RS: torch.Tensor) -> torch.Tensor:
    """Columns ``column_RS`` of every row: [R, T, d] -> [R, S, d]."""
    index_RS1 = column_RS.to(hidden_RTD.device)[..., None]
    return hidden_RTD.gather(1, index_RS1.expand(-1, -1, hidden_RTD.shape[-1]))
