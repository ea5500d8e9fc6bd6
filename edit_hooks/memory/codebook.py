"""A codebook on one linear map: if a prompt's activation is near a key, a stored value replaces the map's output.

The entries are those of GRACE (``editors/grace.py``). Keys are inputs of the module at the last prompt token, values
replace its output, and each key has a radius. A row is looked up once, at prefill, by its own last prompt token, and
the entry holds for its decoding steps; cached decoding then writes the same text as uncached decoding. With ``query:
every_step`` each new token is looked up too, as the released code does with a cache.

Shapes: R rows, T tokens of the pass, Q queries, N entries, F and D input and output width of the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_table, on_target
from edit_hooks.deltas.schema import Record, Schema, Tensor, list_of, one_of, require_distinct, same_length, text, whole
from edit_hooks.memory.steps import STEP_NUMBERS, NumberedRows, settings_of_sum, sum_of_rows
from edit_hooks.modeling.tensors import in_widest_type
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE

Replacement = Literal["replace_last", "replace_prompt", "replace_all"]
Query = Literal["prefill", "every_step"]

NO_ENTRY = -1
ROUNDINGS = 4  # of one value, by which a prompt's activations differ between batches (3.5 on Gemma 3 270M in bfloat16)


def replaced_positions(replacement: Replacement, context: ForwardContext) -> torch.Tensor:
    """bool [R, T]: the columns of a prefill pass whose output a value replaces.

    ``replace_last``: the last prompt token; ``replace_prompt``: the prompt tokens before the last one (which is
    excluded, as in the release); ``replace_all``: every token, continuations included.
    """
    columns_T = torch.arange(context.attended_RT.shape[1], device=context.attended_RT.device)
    if replacement == "replace_all":
        return context.attended_RT
    if replacement == "replace_prompt":
        return context.attended_RT & (columns_T < context.prompt_end_R[:, None])
    return columns_T == context.prompt_end_R[:, None]


def distances(query_QF: torch.Tensor, keys_NF: torch.Tensor) -> torch.Tensor:
    """Euclidean distances [Q, N] in at least float32, from differences: exactly zero for equal vectors."""
    query_QF, keys_NF = in_widest_type(query_QF, keys_NF)
    return torch.cdist(query_QF, keys_NF, compute_mode="donot_use_mm_for_euclid_dist")


def same_prompt_distance(chosen: float, model: PreTrainedModel) -> float:
    """Relative distance up to which two activations are those of the same prompt.

    In 16 bits it is never below what rounding alone gives between batches: 0.031 in bfloat16, 0.0039 in float16.

    Args:
        chosen: of the configuration, in units of the query's norm; it holds in float32.
    """
    dtype = model.get_input_embeddings().weight.dtype  # of the activations, also where the maps are quantized
    return max(chosen, ROUNDINGS * torch.finfo(dtype).eps)


RADIUS_WARNING = (
    "the radius is smaller than the distance that rounding alone makes between two passes over the same prompt in this "
    "precision, so the edit can miss its own prompt in another batch. Use a larger radius, or dtype=float32."
)


def radius_warnings(radius: float, query_norm: float, model: PreTrainedModel) -> list[str]:
    """The warning about a radius that rounding exceeds, if it does."""
    return [RADIUS_WARNING] if radius < same_prompt_distance(0.0, model) * query_norm else []


class CodebookHooks(HookKind):
    """Rows under one or several codebooks.

    Tensors: ``keys`` [N, F], ``values`` [N, D], ``radii`` [N], and ``index`` [N], the entries' numbers in the codebook
    (a step of a stream holds only the entries it added or changed). Settings: ``module``, ``replacement``, ``query``,
    the ``labels`` of the entries (token ids of their targets), which editing needs, and those of
    :mod:`edit_hooks.memory.steps`.
    """

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_entry_R",)
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "replacement": one_of(*get_args(Replacement)),
                "query": one_of(*get_args(Query)),
                "labels": list_of(list_of(whole())),
                **STEP_NUMBERS,
            },
        ),
        {
            "keys": Tensor("N F"),
            "values": Tensor("N D"),
            "radii": Tensor("N", within=NON_NEGATIVE),
            "index": Tensor("N", "whole", NON_NEGATIVE),
        },
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._codebooks = [on_target(model, edit) for edit in edits]
        self._entry_R: torch.Tensor | None = None  # entry of each row, looked up at prefill

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        same_length("settings.labels", hook_edit.settings["labels"], len(hook_edit.tensors["index"]))
        require_distinct("tensor index", hook_edit.tensors["index"].tolist())
        if not len(hook_edit.tensors["keys"]):
            raise EditingError("tensor keys has no entry.")

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        check_table(model, hook_edit, "values")

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The codebook after the last step: each entry as the last step that changed it left it."""
        table = NumberedRows.of(steps, "index", ("keys", "values", "radii"))
        settings = {**settings_of_sum(steps), "labels": table.entries("labels")}
        return sum_of_rows(steps[0].kind, table.rows, settings)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        entry_RT = self._entries(index, x_RTF)
        is_hit_RT = entry_RT != NO_ENTRY
        if not is_hit_RT.any():
            return output_RTD
        replaced_RTD = output_RTD.clone()
        values_ND = self._codebooks[index]["values"]
        replaced_RTD[is_hit_RT] = values_ND[entry_RT[is_hit_RT]].to(output_RTD.dtype)
        return replaced_RTD

    def _entries(self, index: int, x_RTF: torch.Tensor) -> torch.Tensor:
        """Entry [R, T] whose value replaces the output of each token, :data:`NO_ENTRY` for none."""
        context, settings = self.forward_context.to(x_RTF.device), self.edits[index].settings
        rows = self.rows_of_edit(index, len(x_RTF), x_RTF.device)
        if self._entry_R is None or (context.prefill and len(self._entry_R) != len(x_RTF)):
            self._entry_R = torch.full((len(x_RTF),), NO_ENTRY, device=x_RTF.device)
        every_step = settings["query"] == "every_step"
        entry_RT = torch.full(x_RTF.shape[:2], NO_ENTRY, device=x_RTF.device)
        if context.prefill:
            entry_R = self._look_up(index, x_RTF[rows, context.prompt_end_R[rows]])
            self._entry_R[rows] = entry_R
            is_replaced_RT = replaced_positions(settings["replacement"], context)[rows]
            entry_RT[rows] = torch.where(is_replaced_RT, entry_R[:, None], NO_ENTRY)
            if every_step:
                self._look_up_continuation(index, rows, x_RTF, entry_RT)
        elif settings["replacement"] == "replace_all" and not every_step:
            entry_RT[rows, 0] = self._entry_R[rows]
        elif settings["replacement"] != "replace_prompt" and every_step:
            entry_RT[rows, 0] = self._look_up(index, x_RTF[rows, 0])
        return entry_RT

    def _look_up(self, index: int, query_QF: torch.Tensor) -> torch.Tensor:
        """Entry [Q] of the nearest key if the query lies within its radius, else :data:`NO_ENTRY`."""
        codebook = self._codebooks[index]
        nearest_Q = distances(query_QF, codebook["keys"]).min(1)
        is_hit_Q = nearest_Q.values <= codebook["radii"][nearest_Q.indices]
        return torch.where(is_hit_Q, nearest_Q.indices, NO_ENTRY)

    def _look_up_continuation(
        self, index: int, rows: torch.Tensor, x_RTF: torch.Tensor, entry_RT: torch.Tensor
    ) -> None:
        """Teacher forcing with ``query: every_step``: look up each token after the prompt, as decoding would."""
        context = self.forward_context.to(x_RTF.device)
        is_after_RT = torch.zeros_like(context.attended_RT)
        is_after_RT[rows] = (context.attended_RT & ~context.prompt_RT)[rows]
        if not is_after_RT.any():
            return
        replaces = self.edits[index].settings["replacement"] != "replace_prompt"
        entry_RT[is_after_RT] = self._look_up(index, x_RTF[is_after_RT]) if replaces else NO_ENTRY
