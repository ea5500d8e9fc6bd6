"""Forward passes to the labels of a batch of rows, repeated while some linear maps are trained.

:class:`PlainLabelForward` runs every token through the whole model and forms all logits, as the released loops do.
:class:`CachedLabelForward` computes the same losses up to rounding and skips constant parts:

- the blocks below the first trained map, and of its block the parts that do not depend on it, run once;
- the last block projects its attention and runs its MLP at the label positions only;
- the vocabulary is read once per pass, in slices, for the labels of all rows: losses and their gradients come from the
  same read, and no tensor of all logits exists (:mod:`edit_hooks.modeling.forward.vocab_loss`).

Shapes: R rows, T columns, L labels, P distinct label positions, d residual width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from edit_hooks.gradient.labeled_rows import LabeledRows, attention_of
from edit_hooks.modeling.architectures import architecture_of, decoder_of, num_layers
from edit_hooks.modeling.device.run_ahead import upload
from edit_hooks.modeling.forward.lm_head import ModelHead, default_max_logits
from edit_hooks.modeling.forward.vocab_loss import vocab_losses
from edit_hooks.modeling.hooks import (
    CachedOutput,
    Registration,
    hooks,
    on_input,
    on_output,
    outputs_replaced,
    record_output,
    select_positions,
    stop_after,
)
from edit_hooks.modeling.tensors import at_least_float32


class LabelForward(Protocol):
    """Repeated forward passes over one batch of rows.

    Attributes:
        rows: the batch.
    """

    rows: LabeledRows

    def nll(self) -> torch.Tensor:
        """Negative log-likelihood [L] of every label in nats, on the device of the rows; differentiable."""

    def select(self, keep_R: torch.Tensor) -> None:
        """Drop rows (boolean mask on the CPU)."""


class PlainLabelForward:
    """Every token of every row through all blocks, and logits at every position."""

    def __init__(self, model: Any, rows: LabeledRows, trained: Sequence[str]) -> None:
        self.model, self.rows = model, rows

    def nll(self) -> torch.Tensor:
        rows = self.rows
        logits_RTV = self.model(**rows.inputs(), use_cache=False).logits
        device = logits_RTV.device
        logits_LV = at_least_float32(logits_RTV[rows.row_L.to(device), rows.column_L.to(device)])
        nll_L = nn.functional.cross_entropy(logits_LV, rows.token_L.to(device), reduction="none")
        return nll_L.to(rows.token_L.device)

    def select(self, keep_R: torch.Tensor) -> None:
        self.rows = self.rows.select(keep_R)


class FixedModule(NamedTuple):
    """A module whose output does not depend on the trained maps, and the modules that return it."""

    source: str
    replaces: tuple[str, ...]


def first_trained_block(model: Any, trained: Sequence[str]) -> int:
    """The first block with a trained map."""
    arch = architecture_of(model)
    return next(layer for layer in range(num_layers(model)) if _any_within(trained, arch.block_name(layer)))


def fixed_modules(model: Any, trained: Sequence[str]) -> list[FixedModule]:
    """The blocks below the first trained map, and in its block the attention and the MLP up to the map."""
    arch, first = architecture_of(model), first_trained_block(model, trained)
    fixed = []
    if first > 0:
        below = tuple(arch.block_name(layer) for layer in range(first))
        fixed.append(FixedModule(below[-1], below))
    if not arch.has("attention", first):
        return fixed
    attention = arch.attention_name(first)
    mlp_in = arch.module_names("mlp_in", first) if arch.has("mlp_in", first) else []
    if not _any_within(trained, attention):
        fixed.append(FixedModule(attention, (attention,)))
        if not any(_any_within(trained, name) for name in mlp_in):
            fixed += [FixedModule(name, (name,)) for name in mlp_in]
    return fixed


def recording_outputs(
    model: Any, fixed: Sequence[FixedModule], outputs: dict[str, CachedOutput]
) -> contextlib.AbstractContextManager[None]:
    """Record the outputs of fixed modules in ``outputs``, by source."""
    return hooks(*(record_output(outputs, one.source, model.get_submodule(one.source)) for one in fixed))


class _Positions(NamedTuple):
    """The distinct positions of labels, and for every label the number of its position."""

    row_P: torch.Tensor
    column_P: torch.Tensor
    index_L: torch.Tensor

    @classmethod
    def of(cls, rows: LabeledRows) -> _Positions:
        (row_L, column_L), (width, device) = rows.places_2L, (rows.ids_RT.shape[1], rows.ids_RT.device)
        position_P, index_L = (row_L * width + column_L).unique(return_inverse=True)
        return cls(*(upload(one, device) for one in (position_P // width, position_P % width, index_L)))


class CachedLabelForward:
    """Forward passes without their constant parts.

    Args:
        trained: names of the linear maps whose output may change between passes; their weights or hooks on them.
        outputs: those of the fixed modules, if an earlier pass over the same rows has them.
    """

    def __init__(
        self, model: Any, rows: LabeledRows, trained: Sequence[str], outputs: list[CachedOutput] | None = None
    ) -> None:
        self.model, self.rows = model, rows
        self.arch = architecture_of(model)
        self.head = ModelHead(model)
        self.first_block = first_trained_block(model, trained)
        self.fixed = fixed_modules(model, trained)
        self.outputs = self._run_fixed() if outputs is None else outputs
        self.positions = _Positions.of(rows)
        last = num_layers(model) - 1
        position_wise = [
            name
            for role in ("attention_out", "mlp")
            if self.arch.has(role, last)
            for name in self.arch.module_names(role, last)
        ]
        self.at_labels = [name for name in position_wise if not _any_within(trained, name)]

    @torch.no_grad()
    def _run_fixed(self) -> list[CachedOutput]:
        """Run the model up to the first trained block; the outputs of the fixed modules."""
        if not self.fixed:
            return []
        outputs: dict[str, CachedOutput] = {}
        first = self.model.get_submodule(self.arch.block_name(self.first_block))
        with recording_outputs(self.model, self.fixed, outputs), stop_after(first):
            self.model(**self.rows.inputs(), use_cache=False)
        return [outputs[source] for source, _ in self.fixed]

    def _decode(self) -> torch.Tensor:
        """Last hidden states [R, T, d]."""
        is_tree = self.rows.position_RT is not None  # whose mask is that of the model's own attention
        with contextlib.nullcontext() if is_tree else attention_of(self.model, self.rows.ids_RT.device):
            return decoder_of(self.model)(**self.rows.inputs(), use_cache=False).last_hidden_state

    def nll(self) -> torch.Tensor:
        return shared_nll([self.label_states()], [self])[0]

    def label_states(self) -> torch.Tensor:
        """Inputs of the head at the labels, [L, d]; differentiable."""
        row_P, column_P, index_L = self.positions
        with self._fixed_replaced(), hooks(*self._confined(row_P, column_P)):
            states_PD = select_positions(row_P, column_P)(self._decode())[0]
        return states_PD[index_L.to(states_PD.device)]

    @contextlib.contextmanager
    def _fixed_replaced(self) -> Iterator[None]:
        """Let the fixed modules return their cached outputs."""
        with contextlib.ExitStack() as scope:
            for (_, replaces), output in zip(self.fixed, self.outputs, strict=True):
                modules = [self.model.get_submodule(name) for name in replaces]
                scope.enter_context(outputs_replaced(modules, output.as_output()))
            yield

    def _confined(self, row_P: torch.Tensor, column_P: torch.Tensor) -> list[Registration]:
        """Hooks that run the last block's position-wise modules at the label positions; zeros elsewhere.

        The residual stream is then wrong at all other positions, where nothing reads it.
        """
        shape = self.rows.ids_RT.shape

        def spread(output_1PD: torch.Tensor) -> torch.Tensor:
            index = row_P.to(output_1PD.device), column_P.to(output_1PD.device)
            return output_1PD.new_zeros(*shape, output_1PD.shape[2]).index_put(index, output_1PD[0])

        modules = [self.model.get_submodule(name) for name in self.at_labels]
        select = select_positions(row_P, column_P)
        return [on_input(module, select) for module in modules] + [on_output(module, spread) for module in modules]

    def select(self, keep_R: torch.Tensor) -> None:
        self.rows = self.rows.select(keep_R)
        self.positions = _Positions.of(self.rows)
        rows_K = keep_R.nonzero()[:, 0]
        self.outputs = [
            output._replace(hidden=output.hidden[upload(rows_K, output.hidden.device)]) for output in self.outputs
        ]

    def end_at_labels(self) -> None:
        """Drop the columns after the last label, which no loss depends on."""
        assert self.rows.position_RT is None, "the mask of a tree has columns of its own"
        width = int(self.rows.places_2L[1].max()) + 1
        self.rows = replace(self.rows, ids_RT=self.rows.ids_RT[:, :width], mask_RT=self.rows.mask_RT[:, :width])
        self.outputs = [output._replace(hidden=output.hidden[:, :width]) for output in self.outputs]


def shared_nll(states: Sequence[torch.Tensor], forwards: Sequence[CachedLabelForward]) -> list[torch.Tensor]:
    """:meth:`LabelForward.nll` of several batches of one model, with one read of the vocabulary.

    Args:
        states: :meth:`CachedLabelForward.label_states` of every batch.
    """
    states_LD = torch.cat(list(states))
    token_L = torch.cat([forward.rows.token_L for forward in forwards])
    nll_L = vocab_losses(forwards[0].head, states_LD, token_L, None, default_max_logits(states_LD.device)).nll_L
    return list(nll_L.to(token_L.device).split([len(forward.rows.token_L) for forward in forwards]))


ENGINES: dict[str, type[CachedLabelForward] | type[PlainLabelForward]] = {
    "fast": CachedLabelForward,
    "reference": PlainLabelForward,
}


def _any_within(names: Sequence[str], module: str) -> bool:
    """Whether one of the names is the module or part of it."""
    return any(name == module or name.startswith(f"{module}.") for name in names)
