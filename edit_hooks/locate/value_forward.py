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
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from edit_hooks.locate.value_batch import Batch, Captured, Site
from edit_hooks.modeling import prefix_attention
from edit_hooks.modeling.architectures import Architecture, architecture_of, decoder_of, unwrapped
from edit_hooks.modeling.hooks import forward_replaced, hidden_of, hooks, on_input, on_output
from edit_hooks.modeling.lm_head import ModelHead, PrecomputedLogits
from edit_hooks.modeling.prefix_cache import Prefix, keys_and_values
from edit_hooks.modeling.tensors import at_least_float32

Captures = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # keys, outputs, site; see `Captured`


class ReferenceForward:
    """Whole sequences through the whole model, as the released loops run it; slow and obviously right."""

    def __init__(self, model: nn.Module, batch: Batch, layer: int, site: Site) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.readout = PrecomputedLogits()
        self.captured = self._capture()

    def _capturing(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[Captures]:
        return captures(self.model, self.arch, column_R, self.layer, self.site)

    def _adding(self, delta_ED: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Inside, the offsets join at the fact tokens."""
        return hooks(on_output(_site_module(self.model, self.arch, self.layer, self.site), self._plus(delta_ED)))

    def _plus(self, delta_ED: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        batch = self.batch
        return lambda hidden: _add_at(hidden, batch.rows_R, batch.positions_R, delta_ED[batch.edit_R])

    @torch.no_grad()
    def _capture(self) -> Captured:
        batch = self.batch
        noisy = noisy_embeddings(self.model, batch.noise_RTD)
        with noisy, self._capturing(batch.positions_R) as captured:
            self.model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False)
        return Captured(*captured())

    def states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Logits at the L label positions, then at the E KL positions, [L + E, V], under per-edit offsets."""
        batch = self.batch
        with noisy_embeddings(self.model, batch.noise_RTD), self._adding(delta_ED):
            logits = self.model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False).logits
        # Normalized at every position, as the released loops do; normalizing twice changes nothing.
        logits = at_least_float32(logits).log_softmax(-1)
        rows = torch.cat([batch.label_row_L, batch.kl_row_E])
        return logits[rows, torch.cat([batch.label_column_L, batch.positions_R[batch.kl_row_E]])]

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        self.batch, _ = self.batch.select(keep_E)


@dataclass(frozen=True)
class Kept:
    """The unedited output of a module, handed on instead of running ``stands_for`` (see `SuffixForward`).

    Attributes:
        source: module whose output is kept. stands_for: modules that hand it on. takes_offset: the offset joins it.
    """

    source: str
    stands_for: tuple[str, ...]
    takes_offset: bool


@dataclass
class Part:
    """Rows of similar suffix length that run together (r of them, S suffix columns), and what their steps reuse.

    Attributes:
        rows_r: their numbers in the batch. ids_rS, position_ids_rS, mask_rC: the suffix; prefix and suffix columns that
            hold tokens. entries: per block keys and values of the prefix. outputs: per kept module its hidden states.
        noise_rSD: what joins the embeddings.
    """

    rows_r: torch.Tensor
    ids_rS: torch.Tensor
    position_ids_rS: torch.Tensor
    mask_rC: torch.Tensor
    entries: list[tuple[torch.Tensor, torch.Tensor]]
    outputs: list[torch.Tensor]
    noise_rSD: torch.Tensor | None

    def run(self, model: Any) -> Any:
        """The decoder's output for the suffix."""
        inputs = {"input_ids": self.ids_rS, "attention_mask": self.mask_rC, "position_ids": self.position_ids_rS}
        if not self.entries:
            return decoder_of(model)(**inputs, use_cache=False)
        apart = prefix_attention.is_supported(model)
        with (
            prefix_attention.kept_prefix(model, self.entries)
            if apart
            else contextlib.nullcontext(DynamicCache(self.entries))
        ) as cache:
            return decoder_of(model)(**inputs, past_key_values=cache, use_cache=True)

    def select(self, keep_r: torch.Tensor, new_row_R: torch.Tensor) -> Part:
        """Only some of the rows, with their new numbers."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[keep_r.to(tensor.device)]

        return Part(
            rows_r=new_row_R[kept(self.rows_r)],
            ids_rS=kept(self.ids_rS),
            position_ids_rS=kept(self.position_ids_rS),
            mask_rC=kept(self.mask_rC),
            entries=[(kept(keys), kept(values)) for keys, values in self.entries],
            outputs=[kept(output) for output in self.outputs],
            noise_rSD=None if self.noise_rSD is None else kept(self.noise_rSD),
        )


class SuffixForward:
    """Only the tokens from the fact token on, only the blocks from the edited one up, only the logits that matter.

    Exact because the offset enters at one block and one position: by causality nothing before that position changes
    at any block, and nothing at all changes below that block. What stands before the fact tokens gives keys and values
    once (:mod:`edit_hooks.modeling.prefix_cache`); the tokens from there on then run up to the edited block, once.
    """

    def __init__(self, model: nn.Module, batch: Batch, layer: int, site: Site) -> None:
        self.model, self.batch, self.layer, self.site = unwrapped(model), batch, layer, site
        self.arch = architecture_of(self.model)
        self.readout = ModelHead(self.model)
        self.kept = self._modules_to_keep()
        self._prepare()

    def _modules_to_keep(self) -> list[Kept]:
        """What does not depend on the offset: all blocks below, and the edited block up to where the offset joins."""
        block, layer = self.arch.block_name, self.layer
        if self.site == "block":
            return [Kept(block(layer), tuple(block(number) for number in range(layer + 1)), True)]
        attention, mlp = self.arch.attention.format(layer), self.arch.mlp_name(layer)
        kept = [Kept(attention, (attention,), False), Kept(mlp, (mlp,), True)]
        if layer > 0:
            kept.append(Kept(block(layer - 1), tuple(block(number) for number in range(layer)), False))
        return kept

    @torch.no_grad()
    def _prepare(self) -> None:
        """The unedited pass: keys and values of the prefixes, then the suffixes up to the edited block."""
        batch = self.batch
        rows = zip(batch.ids_RT.tolist(), batch.positions_R.tolist(), strict=True)
        before = [row[:position] for row, position in rows]
        with self._noisy(batch.noise_RTD):
            prefix = keys_and_values(self.model, before, share=batch.noise_RTD is None)
        suffix_R = batch.mask_RT.sum(1) - batch.positions_R
        suffix_R[batch.kl_row_E] = 1  # read at the fact token, so nothing behind it matters
        self.parts: list[Part] = []
        pieces = []
        for numbers in _of_similar_length(suffix_R.tolist(), WORTH_A_PASS[suffix_R.device.type == "cuda"]):
            rows_r = torch.tensor(numbers, device=suffix_R.device)
            part, captured = self._prepare_part(rows_r, suffix_R[rows_r], prefix)
            self.parts.append(part)
            pieces.append(captured)
        order_R = torch.cat([part.rows_r for part in self.parts]).argsort()
        self.captured = Captured(
            *(torch.cat(parts)[order_R.to(parts[0].device)] for parts in zip(*pieces, strict=True))  # type: ignore[arg-type]
        )

    def _prepare_part(
        self, rows_r: torch.Tensor, suffix_r: torch.Tensor, prefix: Prefix | None
    ) -> tuple[Part, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What the steps of some rows reuse, and their activations at the fact token."""
        batch = self.batch
        columns_S = torch.arange(int(suffix_r.max()), device=suffix_r.device)
        index_rS = (batch.positions_R[rows_r, None] + columns_S).clamp(max=batch.ids_RT.shape[1] - 1)
        mask_rC = (columns_S < suffix_r[:, None]).long()
        entries: list[tuple[torch.Tensor, torch.Tensor]] = []
        if prefix is not None and not prefix.length_R[rows_r].any():
            prefix = None
        if prefix is not None:
            prefix = prefix.rows(rows_r)
            entries = prefix.entries
            mask_rC = torch.cat([prefix.mask_RP, mask_rC], 1)
        noise_rSD = None if batch.noise_RTD is None else _columns(batch.noise_RTD[rows_r], index_rS)
        part = Part(rows_r, batch.ids_RT[rows_r].gather(1, index_rS), index_rS, mask_rC, entries, [], noise_rSD)
        outputs: dict[str, Any] = {}

        def keep(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                outputs[name] = output

            return lambda: self.model.get_submodule(name).register_forward_hook(hook)

        reads = [keep(kept.source) for kept in self.kept]
        first_r = torch.zeros_like(rows_r)
        with (
            self._capturing(first_r) as captured,
            hooks(*reads),
            self._noisy(noise_rSD),
            _only_up_to(self.model.get_submodule(self.arch.block_name(self.layer))),
        ):
            part.run(self.model)
        # Families differ in what surrounds the hidden states: nothing, or a tuple with attention weights.
        self._tuple_lengths = [
            None if isinstance(outputs[kept.source], torch.Tensor) else len(outputs[kept.source]) for kept in self.kept
        ]
        part.outputs = [hidden_of(outputs[kept.source]) for kept in self.kept]
        if prefix is not None:
            # The blocks up to the edited one never read theirs again: only the length counts, for the mask.
            placeholder = torch.zeros(len(rows_r), 1, prefix.width, 1, device=rows_r.device)
            part.entries = [
                (placeholder, placeholder) if number <= self.layer else entry for number, entry in enumerate(entries)
            ]
        return part, captured()

    def states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """What the head gets at the L label positions, then at the E KL positions, [L + E, d], under the offsets."""
        batch = self.batch
        offset_RD = delta_ED[batch.edit_R]
        found = []
        start_R = torch.zeros_like(batch.edit_R)  # where a row begins once all parts' tokens stand one after another
        start = 0
        for part in self.parts:
            with contextlib.ExitStack() as scope:
                scope.enter_context(self._noisy(part.noise_rSD))
                self._join(scope, part, offset_RD[part.rows_r])
                hidden_rSD = part.run(self.model).last_hidden_state
            found.append(hidden_rSD.flatten(0, 1))
            width = hidden_rSD.shape[1]
            start_R[part.rows_r] = start + width * torch.arange(len(part.rows_r), device=start_R.device)
            start += width * len(part.rows_r)
        label_column_L = batch.label_column_L - batch.positions_R[batch.label_row_L]
        index_N = torch.cat([start_R[batch.label_row_L] + label_column_L, start_R[batch.kl_row_E]])
        return torch.cat(found)[index_N.to(found[0].device)]

    def _capturing(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[Captures]:
        return captures(self.model, self.arch, column_R, self.layer, self.site)

    def _join(self, scope: contextlib.ExitStack, part: Part, offset_rD: torch.Tensor) -> None:
        """Let modules hand on kept outputs instead of computing; the offset joins where it belongs."""
        for kept, output, length in zip(self.kept, part.outputs, self._tuple_lengths, strict=True):
            hidden = add_at_first(output, offset_rD) if kept.takes_offset else output
            result = hidden if length is None else (hidden, *[None] * (length - 1))
            for name in kept.stands_for:
                scope.enter_context(forward_replaced(self.model.get_submodule(name), _always(result)))

    def _noisy(self, noise_RTD: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
        return noisy_embeddings(self.model, noise_RTD)

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        keep_R = keep_E[self.batch.edit_R]
        new_row_R = keep_R.cumsum(0) - 1
        self.batch, _ = self.batch.select(keep_E)
        parts = [part.select(keep_R[part.rows_r], new_row_R) for part in self.parts]
        self.parts = [part for part in parts if len(part.rows_r)]


# Tokens of padding that cost more than another pass: a small one makes a CPU read all weights, a GPU launch hundreds of
# kernels.
WORTH_A_PASS = {False: 24, True: 128}


def _of_similar_length(lengths: Sequence[int], most_padding: int) -> list[list[int]]:
    """Row numbers in groups without much padding, shortest rows first."""
    groups: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups:
            padding += (lengths[index] - lengths[groups[-1][-1]]) * len(groups[-1])
        if not groups or padding > most_padding:
            groups.append([])
            padding = 0
        groups[-1].append(index)
    return groups


class _Reached(Exception):
    """Raised where nothing further is needed of a forward pass."""


@contextlib.contextmanager
def _only_up_to(module: nn.Module) -> Iterator[None]:
    """Forward passes inside end after this module."""

    def stop(*_args: Any) -> None:
        raise _Reached

    with hooks(lambda: module.register_forward_hook(stop)), contextlib.suppress(_Reached):
        yield


@contextlib.contextmanager
def noisy_embeddings(model: Any, noise_RTD: torch.Tensor | None) -> Iterator[None]:
    """Add to what the embedding gives for the first columns."""

    def add(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + noise_RTD[:, : hidden.shape[1]].to(hidden)  # type: ignore[index]

    with hooks(*([] if noise_RTD is None else [on_output(model.get_input_embeddings(), add)])):
        yield


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: result


def _columns(hidden_RTD: torch.Tensor, index_RS: torch.Tensor) -> torch.Tensor:
    """Columns ``index_RS`` of every row: [R, T, d] -> [R, S, d]."""
    return hidden_RTD.gather(1, index_RS.to(hidden_RTD.device)[..., None].expand(-1, -1, hidden_RTD.shape[-1]))


def _site_module(model: nn.Module, arch: Architecture, layer: int, site: Site) -> nn.Module:
    return model.get_submodule(arch.mlp_name(layer) if site == "mlp" else arch.block_name(layer))


@contextlib.contextmanager
def captures(
    model: nn.Module, arch: Architecture, column_R: torch.Tensor, layer: int, site: Site
) -> Iterator[Captures]:
    """Hooks that keep keys, rewrite outputs and site outputs at one column per row; yields a function giving them."""
    kept: dict[str, torch.Tensor] = {}
    row_R = torch.arange(len(column_R), device=column_R.device)
    rewrite = model.get_submodule(arch.rewrite_name(layer))

    def keep(name: str) -> Any:
        def read(hidden: torch.Tensor) -> None:
            kept[name] = at_least_float32(hidden[row_R.to(hidden.device), column_R.to(hidden.device)].detach())

        return read

    with hooks(
        on_input(rewrite, keep("keys")),
        on_output(rewrite, keep("outputs")),
        on_output(_site_module(model, arch, layer, site), keep("site")),
    ):
        yield lambda: (kept["keys"], kept["outputs"], kept["site"])


def _add_at(hidden: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``hidden`` plus ``offset`` at one position per row, out of place so that gradients reach the offset."""
    rows, columns = rows.to(hidden.device), columns.to(hidden.device)
    padded = torch.zeros_like(hidden).index_put((rows, columns), offset.to(hidden.device, hidden.dtype))
    return hidden + padded


def add_at_first(hidden: torch.Tensor, offset_RD: torch.Tensor) -> torch.Tensor:
    """``hidden`` plus ``offset`` in the first column, out of place."""
    first = hidden[:, :1] + offset_RD.to(hidden.device, hidden.dtype)[:, None]
    return torch.cat([first, hidden[:, 1:]], 1)
