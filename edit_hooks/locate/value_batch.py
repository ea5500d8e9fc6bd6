"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from edit_hooks.locate.rows import Row

Site = Literal["mlp", "block"]


@dataclass
class Captured:
    """Activations at the fact token of every row, on the unedited model.

    Attributes:
        keys_RF: input of the rewrite module. outputs_RD: its output. site_RD: output of the optimized module.
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
        noise_RTD: added to the input embeddings, if anything.
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
                noise_RTD=None if self.noise_RTD is None else self.noise_RTD[rows],
            ),
            rows,
        )
