"""Two ways to ask "what are the logits if an offset is added at the fact tokens?": the plain one and the fast one.

Both answer the same question and agree to rounding:

- `ReferenceForward` runs the whole model on whole sequences and reads the positions that matter.
- `SuffixForward` never recomputes what cannot change: everything before the fact token (its keys and values are
  kept), every block below the edited one and the edited block up to its MLP output (their outputs are kept). A step
  runs the tokens from the fact token on through the upper blocks, and the head at the label positions only.

Shapes: R rows, E edits, d residual width, f MLP width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from edit_hooks.architectures import Architecture, architecture_of, decoder_of, unwrapped
from edit_hooks.capture import first_tensor, forward_replaced, hooks, on_input, on_output, widened
from edit_hooks.kv_cache import shift_columns
from edit_hooks.locate import Row

Site = Literal["mlp", "block"]


@dataclass
class Captured:
    """Activations at the fact token of every row, on the unedited model.

    Attributes:
        keys_RF: input of the rewrite module. outputs_RD: its output. site_RD: output of the optimised module.
    """

    keys_RF: torch.Tensor
    outputs_RD: torch.Tensor
    site_RD: torch.Tensor


@dataclass
class Batch:
    """Right-padded rows of several edits.

    Attributes:
        ids_RT, mask_RT: padded token ids and their mask. positions_R: fact token of each row.
        edit_R: edit (0..E-1) each row belongs to.
        label_row_L, label_column_L, label_token_L: where logits are read for target tokens, and the token wanted.
        kl_row_E: the row that carries each edit's KL term.
    """

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor
    positions_R: torch.Tensor
    edit_R: torch.Tensor
    label_row_L: torch.Tensor
    label_column_L: torch.Tensor
    label_token_L: torch.Tensor
    kl_row_E: torch.Tensor

    @classmethod
    def of(cls, problems: Sequence[tuple[Sequence[Row], Row]], device: torch.device) -> Batch:
        """Pad the rewriting rows and the KL row of every edit into one batch (KL rows last)."""
        rows = [(row, edit) for edit, (rewriting, _) in enumerate(problems) for row in rewriting]
        num_rewriting = len(rows)
        rows += [(kl, edit) for edit, (_, kl) in enumerate(problems)]
        width = max(len(row.ids) for row, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        labels = []
        for index, (row, _) in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            mask[index, : len(row.ids)] = 1
            labels += [(index, column, token) for column, token in row.labels]
        label_row, label_column, label_token = (torch.tensor(part, device=device) for part in zip(*labels, strict=True))
        return cls(
            ids_RT=ids.to(device),
            mask_RT=mask.to(device),
            positions_R=torch.tensor([row.position for row, _ in rows], device=device),
            edit_R=torch.tensor([edit for _, edit in rows], device=device),
            label_row_L=label_row,
            label_column_L=label_column,
            label_token_L=label_token,
            kl_row_E=torch.arange(num_rewriting, len(rows), device=device),
        )

    @property
    def rows_R(self) -> torch.Tensor:
        return torch.arange(len(self.ids_RT), device=self.ids_RT.device)

    def select(self, keep_E: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        """The batch without finished edits, and the indices of the rows that stay."""
        keep_R = keep_E[self.edit_R]
        rows = keep_R.nonzero()[:, 0]
        new_row_R = keep_R.cumsum(0) - 1
        new_edit_E = keep_E.cumsum(0) - 1
        labels = keep_R[self.label_row_L]
        return (
            Batch(
                ids_RT=self.ids_RT[rows],
                mask_RT=self.mask_RT[rows],
                positions_R=self.positions_R[rows],
                edit_R=new_edit_E[self.edit_R[rows]],
                label_row_L=new_row_R[self.label_row_L[labels]],
                label_column_L=self.label_column_L[labels],
                label_token_L=self.label_token_L[labels],
                kl_row_E=new_row_R[self.kl_row_E[keep_E]],
            ),
            rows,
        )


class ReferenceForward:
    """Whole sequences through the whole model, as the released loops run it; slow and obviously right."""

    def __init__(self, model: nn.Module, batch: Batch, layer: int, site: Site) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.captured = self._capture()

    def _site_module(self) -> nn.Module:
        return _site_module(self.model, self.arch, self.layer, self.site)

    @torch.no_grad()
    def _capture(self) -> Captured:
        with _captures(self.model, self.arch, self.batch, self.layer, self.site) as captured:
            self.model(input_ids=self.batch.ids_RT, attention_mask=self.batch.mask_RT, use_cache=False)
        return captured()

    def states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Logits at the L label positions, then at the E KL positions, [L + E, V], under per-edit offsets."""
        batch = self.batch

        def add(hidden: torch.Tensor) -> torch.Tensor:
            return _add_at(hidden, batch.rows_R, batch.positions_R, delta_ED[batch.edit_R])

        with hooks(on_output(self._site_module(), add)):
            logits = self.model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False).logits
        # Normalised at every position, as the released loops do; normalising twice changes nothing.
        logits = widened(logits).log_softmax(-1)
        rows = torch.cat([batch.label_row_L, batch.kl_row_E])
        return logits[rows, torch.cat([batch.label_column_L, batch.positions_R[batch.kl_row_E]])]

    def readout(self, states_NV: torch.Tensor) -> torch.Tensor:
        """The states of this path are logits already; see :meth:`SuffixForward.readout`."""
        return states_NV.clone()

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        self.batch, _ = self.batch.select(keep_E)


@dataclass(frozen=True)
class _Kept:
    """The unedited output of a module, handed on instead of running ``stands_for`` (see `SuffixForward`).

    Attributes:
        source: module whose output is kept. stands_for: modules that hand it on. takes_offset: the offset joins it.
    """

    source: str
    stands_for: tuple[str, ...]
    takes_offset: bool


@dataclass
class _Frozen:
    """What a suffix step reuses.

    Attributes:
        cache: per block keys and values of the prefix. outputs: per kept module its hidden states [R, S, d].
        ids_RS, position_ids_RS: the suffix. mask_RC: prefix and suffix columns that hold tokens.
    """

    cache: list[tuple[torch.Tensor, torch.Tensor]]
    outputs: list[torch.Tensor]
    ids_RS: torch.Tensor
    mask_RC: torch.Tensor
    position_ids_RS: torch.Tensor


class SuffixForward:
    """Only the tokens from the fact token on, only the blocks from the edited one up, only the logits that matter.

    Exact because the offset enters at one block and one position: by causality nothing before that position changes
    at any block, and nothing at all changes below that block. One unedited forward fills the keys and values; they are
    then shifted so that every row's fact token stands in the same column.
    """

    def __init__(self, model: nn.Module, batch: Batch, layer: int, site: Site) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.kept = self._modules_to_keep()
        self._prepare()

    def _modules_to_keep(self) -> list[_Kept]:
        """What does not depend on the offset: all blocks below, and the edited block up to where the offset joins."""
        block, layer = self.arch.block_name, self.layer
        if self.site == "block":
            return [_Kept(block(layer), tuple(block(number) for number in range(layer + 1)), True)]
        attention, mlp = self.arch.attention.format(layer), self.arch.mlp_name(layer)
        kept = [_Kept(attention, (attention,), False), _Kept(mlp, (mlp,), True)]
        if layer > 0:
            kept.append(_Kept(block(layer - 1), tuple(block(number) for number in range(layer)), False))
        return kept

    @torch.no_grad()
    def _prepare(self) -> None:
        """One unedited forward: keys and values of the prefix, outputs of the kept modules, activations for editors."""
        batch = self.batch
        outputs: dict[str, Any] = {}

        def keep(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                outputs[name] = output

            return lambda: self.model.get_submodule(name).register_forward_hook(hook)

        cache = DynamicCache()
        reads = [keep(kept.source) for kept in self.kept]
        with _captures(self.model, self.arch, batch, self.layer, self.site) as captured, hooks(*reads):
            decoder_of(self.model)(
                input_ids=batch.ids_RT, attention_mask=batch.mask_RT, past_key_values=cache, use_cache=True
            )
        self.captured = captured()
        # Families differ in what surrounds the hidden states: nothing, or a tuple with attention weights.
        self._tuple_lengths = [
            None if isinstance(outputs[kept.source], torch.Tensor) else len(outputs[kept.source]) for kept in self.kept
        ]
        self.frozen = self._align(cache, [first_tensor(outputs[kept.source]) for kept in self.kept])

    def _align(self, cache: DynamicCache, outputs: list[torch.Tensor]) -> _Frozen:
        """Shift rows so that fact tokens share a column: prefix [R, P] right-aligned, suffix [R, S] left-aligned."""
        batch = self.batch
        device, width = batch.ids_RT.device, batch.ids_RT.shape[1]
        prefix = int(batch.positions_R.max())
        lengths_R = batch.mask_RT.sum(1)
        suffix = int((lengths_R - batch.positions_R).max())
        # Column c of the prefix holds token position_r - P + c; negative ones are padding.
        index_RP = batch.positions_R[:, None] - prefix + torch.arange(prefix, device=device)
        index_RS = batch.positions_R[:, None] + torch.arange(suffix, device=device)
        mask_RC = torch.cat([index_RP >= 0, index_RS < lengths_R[:, None]], 1).long()
        safe_RS = index_RS.clamp(max=width - 1)
        shifted = []
        for number, entry in enumerate(cache.layers):
            if number <= self.layer:
                # Never read: only its length counts, for the mask.
                placeholder = torch.zeros(len(batch.ids_RT), 1, prefix, 1, device=device)
                shifted.append((placeholder, placeholder))
                continue
            shifted.append((shift_columns(entry.keys, index_RP), shift_columns(entry.values, index_RP)))
        return _Frozen(
            cache=shifted,
            outputs=[_columns(output, safe_RS) for output in outputs],
            ids_RS=batch.ids_RT.gather(1, safe_RS),
            mask_RC=mask_RC,
            position_ids_RS=safe_RS,
        )

    def states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """What the head gets at the L label positions, then at the E KL positions, [L + E, d], under the offsets."""
        batch, frozen = self.batch, self.frozen
        offset_RD = delta_ED[batch.edit_R]
        label_column = batch.label_column_L - batch.positions_R[batch.label_row_L]
        row = torch.cat([batch.label_row_L, batch.kl_row_E])
        column = torch.cat([label_column, torch.zeros_like(batch.kl_row_E)])
        has_prefix = frozen.mask_RC.shape[1] > frozen.ids_RS.shape[1]
        with contextlib.ExitStack() as scope:
            self._hand_on_what_is_kept(scope, offset_RD)
            hidden_RSD = decoder_of(self.model)(
                input_ids=frozen.ids_RS,
                attention_mask=frozen.mask_RC,
                position_ids=frozen.position_ids_RS,
                past_key_values=DynamicCache(frozen.cache) if has_prefix else None,
                use_cache=has_prefix,
            ).last_hidden_state
        return hidden_RSD[row.to(hidden_RSD.device), column.to(hidden_RSD.device)]

    def readout(self, states_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of states [N, d]: the head and whatever the model does after it (soft-capping, scaling)."""
        done = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states_ND[None])
        with forward_replaced(decoder_of(self.model), _always(done)):
            return self.model(input_ids=self.frozen.ids_RS[:1, :1]).logits[0]

    def _hand_on_what_is_kept(self, scope: contextlib.ExitStack, offset_RD: torch.Tensor) -> None:
        """Let modules hand on kept outputs instead of computing; the offset joins where it belongs."""
        for kept, output, length in zip(self.kept, self.frozen.outputs, self._tuple_lengths, strict=True):
            hidden = _add_at_first(output, offset_RD) if kept.takes_offset else output
            result = hidden if length is None else (hidden, *[None] * (length - 1))
            for name in kept.stands_for:
                scope.enter_context(forward_replaced(self.model.get_submodule(name), _always(result)))

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        self.batch, rows = self.batch.select(keep_E)
        frozen = self.frozen
        self.frozen = _Frozen(
            cache=[(keys[rows], values[rows]) for keys, values in frozen.cache],
            outputs=[output[rows] for output in frozen.outputs],
            ids_RS=frozen.ids_RS[rows],
            mask_RC=frozen.mask_RC[rows],
            position_ids_RS=frozen.position_ids_RS[rows],
        )


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: result


def _columns(hidden_RTD: torch.Tensor, index_RS: torch.Tensor) -> torch.Tensor:
    """Columns ``index_RS`` of every row: [R, T, d] -> [R, S, d]."""
    return hidden_RTD.gather(1, index_RS.to(hidden_RTD.device)[..., None].expand(-1, -1, hidden_RTD.shape[-1]))


def _site_module(model: nn.Module, arch: Architecture, layer: int, site: Site) -> nn.Module:
    return model.get_submodule(arch.mlp_name(layer) if site == "mlp" else arch.block_name(layer))


@contextlib.contextmanager
def _captures(model: nn.Module, arch: Architecture, batch: Batch, layer: int, site: Site) -> Iterator[Any]:
    """Hooks that keep keys, rewrite outputs and site outputs at the fact tokens; yields a function giving them."""
    kept: dict[str, torch.Tensor] = {}
    rewrite = model.get_submodule(arch.rewrite_name(layer))

    def keep(name: str) -> Any:
        def read(hidden: torch.Tensor) -> None:
            rows, positions = batch.rows_R.to(hidden.device), batch.positions_R.to(hidden.device)
            kept[name] = widened(hidden[rows, positions].detach())

        return read

    with hooks(
        on_input(rewrite, keep("keys")),
        on_output(rewrite, keep("outputs")),
        on_output(_site_module(model, arch, layer, site), keep("site")),
    ):
        yield lambda: Captured(kept["keys"], kept["outputs"], kept["site"])


def _add_at(hidden: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``hidden`` plus ``offset`` at one position per row, out of place so that gradients reach the offset."""
    rows, columns = rows.to(hidden.device), columns.to(hidden.device)
    padded = torch.zeros_like(hidden).index_put((rows, columns), offset.to(hidden.device, hidden.dtype))
    return hidden + padded


def _add_at_first(hidden: torch.Tensor, offset_RD: torch.Tensor) -> torch.Tensor:
    """``hidden`` plus ``offset`` in the first column, out of place."""
    first = hidden[:, :1] + offset_RD.to(hidden.device, hidden.dtype)[:, None]
    return torch.cat([first, hidden[:, 1:]], 1)
