"""Rows of several edits in one batch, and forward passes over them.

Shapes: R rows, T columns, E edits, L labels, d residual width, f MLP width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import nn

from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.modeling.architectures import Architecture
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.forward.lm_head import LMHead
from edit_hooks.modeling.hooks import hooks, on_input, on_output, record_at

Site = Literal["mlp", "block"]

LABEL_STEP = 64  # of numbers of labels in buckets: the head of a model takes as long for 64 as for one


# The rewriting rows of an edit, the bare prompt first, and its KL row.
ValueProblem = tuple[Sequence[TokenRow], TokenRow]


@dataclass
class ValueBatch:
    """Right-padded rows of several edits.

    Rewriting rows come first, edit by edit, then the KL rows.

    Attributes:
        ids_RT, mask_RT: padded token ids and their mask. positions_R: fact token of each row.
        edit_R: edit (0..E-1) each row belongs to.
        label_row_L, label_column_L, label_token_L: where logits are read for target tokens, and the target.
        kl_row_E: the KL row of each edit.
        noise_RTD: noise on the input embeddings, if any.
        held_RTD: offsets at the site before the fact tokens, which stay, if any.
    """

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor
    positions_R: torch.Tensor
    edit_R: torch.Tensor
    label_row_L: torch.Tensor
    label_column_L: torch.Tensor
    label_token_L: torch.Tensor
    kl_row_E: torch.Tensor
    noise_RTD: torch.Tensor | None = None
    held_RTD: torch.Tensor | None = None

    @classmethod
    def of(cls, problems: Sequence[ValueProblem], device: torch.device) -> ValueBatch:
        """Pad the rewriting rows and the KL row of every edit into one batch."""
        rows = [row for rewriting, _ in problems for row in rewriting] + [kl for _, kl in problems]
        edits = [edit for edit, (rewriting, _) in enumerate(problems) for _ in rewriting] + list(range(len(problems)))
        labels = [(index, column, token) for index, row in enumerate(rows) for column, token in row.labels]
        label_row, label_column, label_token = (torch.tensor(part, device=device) for part in zip(*labels, strict=True))
        ids_RT, mask_RT = right_padded([row.ids for row in rows], device)
        return cls(
            ids_RT=ids_RT,
            mask_RT=mask_RT,
            positions_R=torch.tensor([row.position for row in rows], device=device),
            edit_R=torch.tensor(edits, device=device),
            label_row_L=label_row,
            label_column_L=label_column,
            label_token_L=label_token,
            kl_row_E=torch.arange(len(rows) - len(problems), len(rows), device=device),
            held_RTD=_held(rows, ids_RT),
        )

    def select(self, keep_E: torch.Tensor) -> ValueBatch:
        """The batch without finished edits."""
        keep_R = keep_E[self.edit_R]
        rows = keep_R.nonzero()[:, 0]
        new_row_R = keep_R.cumsum(0) - 1
        new_edit_E = keep_E.cumsum(0) - 1
        labels = keep_R[self.label_row_L]
        return ValueBatch(
            ids_RT=self.ids_RT[rows],
            mask_RT=self.mask_RT[rows],
            positions_R=self.positions_R[rows],
            edit_R=new_edit_E[self.edit_R[rows]],
            label_row_L=new_row_R[self.label_row_L[labels]],
            label_column_L=self.label_column_L[labels],
            label_token_L=self.label_token_L[labels],
            kl_row_E=new_row_R[self.kl_row_E[keep_E]],
            noise_RTD=None if self.noise_RTD is None else self.noise_RTD[rows],
            held_RTD=None if self.held_RTD is None else self.held_RTD[rows],
        )

    def with_labels_in_buckets(self) -> ValueBatch:
        """The batch with a multiple of :data:`LABEL_STEP` labels; the others are token 0 after the first label's place.

        Their losses are computed and belong to no edit.
        """
        missing = -len(self.label_token_L) % LABEL_STEP
        row_L, column_L = (
            torch.cat([of_L, of_L[:1].expand(missing)]) for of_L in (self.label_row_L, self.label_column_L)
        )
        token_L = padded_to_step(self.label_token_L, 0, LABEL_STEP)
        return replace(self, label_row_L=row_L, label_column_L=column_L, label_token_L=token_L)


def padded_to_step(tensor: torch.Tensor, axis: int, step: int) -> torch.Tensor:
    """A tensor with zeros at the end of an axis, whose size is a multiple of ``step``."""
    missing = -tensor.shape[axis] % step
    shape = [*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis) if missing else tensor


def _held(rows: Sequence[TokenRow], ids_RT: torch.Tensor) -> torch.Tensor | None:
    """The held offsets of all rows, zero elsewhere; `None` if there is none."""
    held = [(index, position, offset_D) for index, row in enumerate(rows) for position, offset_D in row.held]
    if not held:
        return None
    held_RTD = held[0][2].new_zeros(*ids_RT.shape, len(held[0][2]))
    for index, position, offset_D in held:
        held_RTD[index, position] = offset_D
    return held_RTD


@dataclass
class SiteActivations:
    """Unedited activations at the fact token of every row, at least float32.

    Attributes:
        keys_RF: input of the rewrite module. outputs_RD: its output. site_RD: output of the optimized module.
    """

    keys_RF: torch.Tensor
    outputs_RD: torch.Tensor
    site_RD: torch.Tensor


class ValueForward(Protocol):
    """Forward passes of a batch under per-edit offsets at one layer and site.

    Attributes:
        batch: the rows of the edits still running. lm_head: maps :meth:`hidden_at_labels` to logits.
        activations: at the fact tokens, of the whole batch at construction.
    """

    batch: ValueBatch
    activations: SiteActivations

    @property
    def lm_head(self) -> LMHead: ...

    def hidden_at_labels(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Inputs of ``lm_head`` at the L label positions, then at the E KL positions.

        ``delta_ED`` is added at each edit's fact tokens.
        """

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""


MakeForward = Callable[[ValueBatch], ValueForward]  # at an editor's layer and site


ReadActivations = Callable[[], SiteActivations]  # after a forward pass


@contextlib.contextmanager
def recorded_activations(
    model: nn.Module, arch: Architecture, column_R: torch.Tensor, layer: int, site: Site
) -> Iterator[ReadActivations]:
    """Record activations at one column per row.

    Yields the function that returns them after a forward pass. They are on the device of ``column_R``, the batch's,
    whichever one the edited block is on.
    """
    records: dict[str, torch.Tensor] = {}
    rewrite = model.get_submodule(arch.rewrite_name(layer))
    with hooks(
        on_input(rewrite, record_at(records, "keys", column_R)),
        on_output(rewrite, record_at(records, "outputs", column_R)),
        on_output(site_module(model, arch, layer, site), record_at(records, "site", column_R)),
    ):
        yield lambda: SiteActivations(*(records[name].to(column_R.device) for name in ("keys", "outputs", "site")))


def site_module(model: nn.Module, arch: Architecture, layer: int, site: Site) -> nn.Module:
    """The module whose output the offset is added to."""
    return model.get_submodule(arch.mlp_name(layer) if site == "mlp" else arch.block_name(layer))
