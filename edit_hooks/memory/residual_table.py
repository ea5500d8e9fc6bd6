"""A table of keys and residuals at one linear map: a token near a key has that key's residual added to its output.

The entries are those of NeuralDB (``editors/neural_db.py``). For every token, prompt and continuation alike, the entry
with the most similar key is chosen by cosine; above the threshold its residual is added to the map's output, and below
it nothing changes, bit for bit. A token is looked up by itself, so nothing is kept between passes.

Shapes: R rows, T tokens of the pass, Q tokens looked up, N entries, F and D input and output width of the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_table, on_target
from edit_hooks.deltas.schema import (
    Record,
    Schema,
    Tensor,
    list_of,
    number,
    require_distinct,
    same_length,
    text,
    whole,
)
from edit_hooks.memory.steps import STEP_NUMBERS, NumberedRows, settings_of_sum, sum_of_rows
from edit_hooks.modeling.tensors import in_widest_type
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import COSINE, NON_NEGATIVE

KIND = "residual_table"
MAX_COSINES = 2**24  # held at once
REMOVED = "removed"


class ResidualTableHooks(HookKind):
    """Rows under one or several tables.

    Tensors: ``keys`` [N, F] of unit length, ``residuals`` [N, D], and ``index`` [N], the entries' numbers in the table
    (a step of a stream holds only the entries that it added or changed). Settings: ``module``, ``threshold``, the
    ``facts`` behind the entries, the numbers of the ``removed`` entries, and those of :mod:`edit_hooks.memory.steps`.
    """

    mixes_rows: ClassVar[bool] = True
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "threshold": number(COSINE),
                "facts": list_of(text),
                REMOVED: list_of(whole()),
                **STEP_NUMBERS,
            },
        ),
        {"keys": Tensor("N F"), "residuals": Tensor("N D"), "index": Tensor("N", "whole", NON_NEGATIVE)},
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._tables = [on_target(model, edit) for edit in edits]

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        index, settings = hook_edit.tensors["index"].tolist(), hook_edit.settings
        same_length("settings.facts", settings["facts"], len(index))
        require_distinct("tensor index and settings.removed together", [*index, *settings[REMOVED]])
        require_distinct("settings.facts", settings["facts"])
        if not (index or settings[REMOVED]):
            raise EditingError("tensor index has no entry, and settings.removed neither.")

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        check_table(model, hook_edit, "residuals")

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The table after the last step: each entry as the last step that changed it left it, without removed ones."""
        table = NumberedRows.of(steps, "index", ("keys", "residuals"), REMOVED)
        settings = {**settings_of_sum(steps), "facts": table.entries("facts"), REMOVED: table.removed}
        return sum_of_rows(steps[0].kind, table.rows, settings)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        table = self._tables[index]
        if not len(table["keys"]):
            return output_RTD
        own_RT = torch.zeros(output_RTD.shape[:2], dtype=torch.bool, device=x_RTF.device)
        own_RT[self.rows_of_edit(index, len(x_RTF), x_RTF.device)] = True
        own_RT &= self.forward_context.to(x_RTF.device).attended_RT
        row_Q, column_Q = own_RT.nonzero(as_tuple=True)
        cosine_Q, entry_Q = nearest_entries(x_RTF[own_RT], table["keys"])
        is_hit_Q = cosine_Q > self.edits[index].settings["threshold"]
        if not is_hit_Q.any():
            return output_RTD
        row_Q, column_Q, entry_Q = (of_Q[is_hit_Q].to(output_RTD.device) for of_Q in (row_Q, column_Q, entry_Q))
        output, residuals = in_widest_type(output_RTD[row_Q, column_Q], table["residuals"].to(output_RTD.device))
        changed_RTD = output_RTD.clone()
        changed_RTD[row_Q, column_Q] = (output + residuals[entry_Q]).to(output_RTD.dtype)
        return changed_RTD


def nearest_entries(x_QF: torch.Tensor, keys_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest cosine [Q] of each token to a key of unit length, and that key's position [Q]; of equal ones the first.

    In at least float32, and at most :data:`MAX_COSINES` at once.
    """
    parts = []
    for chunk_QF in x_QF.split(max(1, MAX_COSINES // len(keys_NF))):
        x_QF, keys_NF = in_widest_type(chunk_QF, keys_NF)
        nearest_Q = (nn.functional.normalize(x_QF, dim=1) @ keys_NF.T).max(1)
        parts.append((nearest_Q.values, nearest_Q.indices))
    if not parts:  # no token
        return x_QF.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=x_QF.device)
    cosine, entry = (torch.cat(column) for column in zip(*parts, strict=True))
    return cosine, entry
