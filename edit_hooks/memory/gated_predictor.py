"""A gate and a predictor beside one linear map: above a threshold of the gate, a predicted value replaces the output.

The two are DEFER's (``editors/defer.py``). The query of a prompt is the map's input at its last token; the gate is the
sigmoid of an affine function of it, the value an affine function. Where the gate reaches the threshold, the value
replaces the map's output at every token of the row. A row is looked up once, at prefill, by its own last prompt token,
and the result holds for its decoding steps; with ``query: every_step`` each new token is looked up by itself, as the
released code does with a cache. Rows below the threshold run unedited, bit for bit.

Shapes: R rows, T tokens of the pass, Q queries, H queries at or above the threshold, E edits, F and D input and output
width of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import nn

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.deltas.schema import Record, Schema, Tensor, number, one_of, text
from edit_hooks.memory.codebook import Query
from edit_hooks.memory.steps import STEP_NUMBERS, settings_of_sum
from edit_hooks.modeling.architectures import weight_of
from edit_hooks.modeling.tensors import in_widest_type
from edit_hooks.utils.settings.numbers import SHARE

KIND = "gated_predictor"


class GatedPredictor(NamedTuple):
    """The gate's weight [F] and bias [], and the predictor's [D, F] and [D]; or those of E edits, stacked."""

    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def gate(self, query_QF: torch.Tensor) -> torch.Tensor:
        """The gate [Q] in (0, 1); with stacked parameters, query e goes through those of edit e."""
        query_QF, weight, bias = in_widest_type(query_QF, self.gate_weight, self.gate_bias)
        return torch.sigmoid((query_QF * weight).sum(-1) + bias)

    def value(self, query_QF: torch.Tensor) -> torch.Tensor:
        """The predicted output [Q, D]; stacked parameters as in :meth:`gate`."""
        query_QF, weight, bias = in_widest_type(query_QF, self.weight, self.bias)
        return (query_QF[:, None] @ weight.mT)[:, 0] + bias

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> GatedPredictor:
        """Apply a function to every tensor."""
        return GatedPredictor(*map(function, self))


class GatedPredictorHooks(HookKind):
    """Rows under one or several gated predictors.

    Tensors: those of :class:`GatedPredictor`. Settings: ``module``, ``threshold``, ``query``, and those
    of :mod:`edit_hooks.memory.steps`.
    """

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_is_hit_R", "_value_RD")
    schema: ClassVar[Schema] = Schema(
        Record(
            {"module": text, "threshold": number(SHARE), "query": one_of(*get_args(Query)), **STEP_NUMBERS},
        ),
        {"gate_weight": Tensor("F"), "gate_bias": Tensor(""), "weight": Tensor("D F"), "bias": Tensor("D")},
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._predictors = []
        for edit in edits:
            predictor = GatedPredictor(**edit.tensors)
            if edit.settings["query"] == "every_step":
                predictor = predictor.map(_mover(weight_of(target_module(model, edit)).device))
            self._predictors.append(predictor)
        # Looked up at prefill. The width is that of the widest edit, which may be of another map.
        self._is_hit_R: torch.Tensor | None = None
        self._value_RD: torch.Tensor | None = None

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        check_width(target_module(model, hook_edit), hook_edit.settings["module"], *hook_edit.tensors["weight"].shape)

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The gate and predictor of the last step, whose training started from those of the step before."""
        return HookEdit(steps[-1].kind, steps[-1].tensors, settings_of_sum(steps))

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        context = self.forward_context.to(output_RTD.device)
        rows = self.rows_of_edit(index, len(output_RTD), output_RTD.device)
        x_RTF = x_RTF.to(output_RTD.device)
        own_RT = torch.zeros_like(context.attended_RT)
        own_RT[rows] = context.attended_RT[rows]
        by_token_RT = torch.zeros_like(own_RT)
        if self.edits[index].settings["query"] == "every_step":
            by_token_RT = own_RT & ~context.prompt_RT if context.prefill else own_RT
        is_hit_R, value_RD = self._row_state(output_RTD)
        if context.prefill:
            is_hit_Q, value_HD = self._look_up(index, x_RTF[rows, context.prompt_end_R[rows]])
            is_hit_R[rows], value_RD[rows[is_hit_Q]] = is_hit_Q, value_HD.to(output_RTD.dtype)
        replaced_RTD = output_RTD
        by_row_RT = own_RT & ~by_token_RT & is_hit_R[:, None]
        if by_row_RT.any():
            replaced_RTD = torch.where(by_row_RT[:, :, None], value_RD[:, None], output_RTD)
        is_hit_Q, value_HD = self._look_up(index, x_RTF[by_token_RT])
        if is_hit_Q.any():
            replaced_RTD = output_RTD.clone() if replaced_RTD is output_RTD else replaced_RTD
            row_Q, column_Q = by_token_RT.nonzero(as_tuple=True)
            replaced_RTD[row_Q[is_hit_Q], column_Q[is_hit_Q]] = value_HD.to(output_RTD.dtype)
        return replaced_RTD

    def _row_state(self, output_RTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each row is a hit [R], and its value [R, D]; views that can be written."""
        num_rows, is_prefill = len(output_RTD), self.forward_context.prefill
        if self._is_hit_R is None or self._value_RD is None or (is_prefill and len(self._is_hit_R) != num_rows):
            width = max(len(predictor.bias) for predictor in self._predictors)
            self._is_hit_R = torch.zeros(num_rows, dtype=torch.bool, device=output_RTD.device)
            self._value_RD = output_RTD.new_zeros(num_rows, width)
        return self._is_hit_R, self._value_RD[:, : output_RTD.shape[2]]

    def _look_up(self, index: int, query_QF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each query's gate reaches the threshold [Q], and the values [H, D] of those that do."""
        # The predictor is as large as the map, and a prompt needs it once: it is moved on use.
        move = _mover(query_QF.device)
        predictor = self._predictors[index]
        gate = predictor._replace(gate_weight=move(predictor.gate_weight), gate_bias=move(predictor.gate_bias))
        is_hit_Q = gate.gate(query_QF) >= self.edits[index].settings["threshold"]
        if not is_hit_Q.any():
            return is_hit_Q, query_QF.new_zeros(0, len(predictor.bias))
        return is_hit_Q, predictor.map(move).value(query_QF[is_hit_Q])


def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device)
