"""A residual memory of one linear map, of which a prompt uses the columns of the most similar edit.

The memory is that of MEMOIR (``editors/memoir.py``): a matrix M beside the map, and a mask of ``top_k`` columns per
edit. A prompt has a mask of its own: the columns at ``permutation`` of the ``top_k`` largest entries of

    phi = mean over the prompt's tokens of the map's inputs - b

in absolute value. If the mask of some edit overlaps with it in a share of at least ``threshold``, the row's output is
W k + M (mask of that edit * k) at every position, continuations included; else W k, bit for bit. A row is looked up
once, at prefill, over its whole prompt.

A step of a stream stores the columns that its edit trained, and the factor by which weight decay shrank the others.

Shapes: R rows, T tokens, N masks, K stored columns, P columns of a mask, F and D input and output width of the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import nn

from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.deltas.schema import Record, Schema, Tensor, number, one_of, require_distinct, text
from edit_hooks.memory.steps import STEP_NUMBERS, rows_of, settings_of_sum, sum_of_rows
from edit_hooks.modeling.architectures import weight_of
from edit_hooks.modeling.tensors import at_least_float32, in_widest_type
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SHARE

Feature = Literal["mean_decentered", "mean", "last"]

KIND = "column_memory"
MAX_ENTRIES = 2**24  # of masks as rows of the width of the map, held at once
NO_MASK = -1
SAME_BACKGROUND = 0.05  # relative distance that rounding in 16 bits may leave


class ColumnMemory(NamedTuple):
    """The memory after some edits.

    Attributes:
        values_DK: columns of M, at least float32; the others are zero. columns_K: their numbers.
        masks_NP: the columns of every mask, ascending.
    """

    values_DK: torch.Tensor
    columns_K: torch.Tensor
    masks_NP: torch.Tensor

    @classmethod
    def of(cls, edit: HookEdit) -> ColumnMemory:
        """That of an edit, the sum of all steps."""
        return cls(edit.tensors["values"], edit.tensors["columns"], edit.tensors["masks"])

    def at(self, columns_P: torch.Tensor) -> torch.Tensor:
        """The columns [D, P] of M."""
        position_F = self.columns_K.new_full((int(torch.cat([self.columns_K, columns_P]).max()) + 1,), -1)
        position_F[self.columns_K] = torch.arange(len(self.columns_K), device=self.columns_K.device)
        position_P = position_F[columns_P]
        is_stored_P = position_P >= 0
        values_DP = self.values_DK.new_zeros(len(self.values_DK), len(columns_P))
        values_DP[:, is_stored_P] = self.values_DK[:, position_P[is_stored_P]]
        return values_DP


class Selection(NamedTuple):
    """What determines the columns of a prompt; :attr:`background_F` up to rounding, as on another device."""

    feature: str
    top_k: int
    permutation_F: torch.Tensor
    background_F: torch.Tensor

    @classmethod
    def of(cls, edit: HookEdit) -> Selection:
        """That of an edit."""
        tensors = edit.tensors
        top_k = tensors["masks"].shape[1]
        return cls(edit.settings["feature"], top_k, tensors["permutation"], tensors["background"])

    def require_same(self, later: Selection) -> None:
        """Refuse a later step that selects in another way: prompts would no longer find the masks of earlier steps.

        Raises:
            EditingError: with what differs.
        """
        background_F, other_F = self.background_F.cpu().float(), later.background_F.cpu().float()
        same = {
            "feature": self.feature == later.feature,
            "top_k": self.top_k == later.top_k,
            "permutation (seed)": torch.equal(self.permutation_F.cpu(), later.permutation_F.cpu()),
            "background": background_F.shape == other_F.shape
            and bool((other_F - background_F).norm() <= SAME_BACKGROUND * background_F.norm()),
        }
        if not all(same.values()):
            differing = ", ".join(name for name, is_same in same.items() if not is_same)
            raise EditingError(
                f"steps of one column_memory select columns in different ways: {differing}. Earlier edits would not be "
                "found by their prompts; a stream has one editor and one configuration throughout."
            )


def prompt_features(
    x_RTF: torch.Tensor, context: ForwardContext, feature: Feature, background_F: torch.Tensor
) -> torch.Tensor:
    """phi [R, F] of the rows' prompts, at least float32, from the map's inputs."""
    if feature == "last":
        return at_least_float32(x_RTF[torch.arange(len(x_RTF), device=x_RTF.device), context.prompt_end_R])
    x_RTF, background_F = in_widest_type(x_RTF, background_F.to(x_RTF.device))
    counted_RT1 = context.prompt_RT[:, :, None]
    mean_RF = torch.where(counted_RT1, x_RTF, 0).sum(1) / counted_RT1.sum(1)
    return mean_RF if feature == "mean" else mean_RF - background_F


def masks_of(feature_RF: torch.Tensor, permutation_F: torch.Tensor, top_k: int) -> torch.Tensor:
    """The columns [R, P] of each row's mask, ascending."""
    largest_RP = feature_RF.abs().topk(top_k, dim=1).indices
    return permutation_F.to(feature_RF.device)[largest_RP].sort(1).values


def overlaps(mask_RP: torch.Tensor, masks_NP: torch.Tensor, width: int) -> torch.Tensor:
    """Share [R, N] of the columns that each row's mask has in common with each mask."""

    def as_rows(columns: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(columns), width, device=columns.device).scatter_(1, columns, 1.0)

    own_RF, chunks = as_rows(mask_RP), masks_NP.to(mask_RP.device).split(max(1, MAX_ENTRIES // width))
    return torch.cat([own_RF @ as_rows(chunk_NP).T for chunk_NP in chunks], 1) / mask_RP.shape[1]


class ColumnMemoryHooks(HookKind):
    """Rows under one or several memories.

    Tensors: those of :class:`ColumnMemory` (of a step: the columns that it trained, and its mask), ``permutation``
    and ``background`` [F]. Settings: ``module``, ``threshold``, ``feature``, ``decay`` (of the columns that a step did
    not train), and those of :mod:`edit_hooks.memory.steps`.
    """

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_mask_R",)
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "threshold": number(SHARE),
                "feature": one_of(*get_args(Feature)),
                "decay": number(SHARE),
                **STEP_NUMBERS,
            },
        ),
        {
            "values": Tensor("D K"),
            "columns": Tensor("K", "whole", NON_NEGATIVE),
            "masks": Tensor("N P", "whole", NON_NEGATIVE),
            "permutation": Tensor("F", "whole", NON_NEGATIVE),
            "background": Tensor("F"),
        },
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._tensors = []
        for edit in edits:
            device = weight_of(target_module(model, edit)).device
            self._tensors.append({name: tensor.to(device) for name, tensor in edit.tensors.items()})
        self._mask_R: torch.Tensor | None = None  # number of each row's mask, looked up at prefill

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        tensors = hook_edit.tensors
        width = len(tensors["permutation"])
        if tensors["permutation"].sort().values.tolist() != list(range(width)):
            raise EditingError("tensor permutation is no permutation of the columns.")
        require_distinct("tensor columns", tensors["columns"].tolist())
        for name in ("columns", "masks"):
            if tensors[name].numel() and int(tensors[name].max()) >= width:
                raise EditingError(f"tensor {name} has the column {int(tensors[name].max())}; there are {width}.")
        if not len(tensors["masks"]):
            raise EditingError("tensor masks has no mask.")
        if not 1 <= tensors["masks"].shape[1] <= width:
            raise EditingError(
                f"tensor masks has {tensors['masks'].shape[1]} columns per mask; 1 to {width} are needed."
            )
        for row in tensors["masks"].tolist():
            require_distinct("a row of tensor masks", row)

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        module, tensors = target_module(model, hook_edit), hook_edit.tensors
        check_width(module, hook_edit.settings["module"], tensors["values"].shape[0], len(tensors["permutation"]))

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The memory after the last step, its columns as the last step that trained them left them, but for decay."""
        memory, decay = ColumnMemory.of(steps[0]), float(steps[0].settings["decay"])
        masks = rows_of(steps[0], "masks")
        for step in steps[1:]:
            Selection.of(steps[0]).require_same(Selection.of(step))
            new, shrink = ColumnMemory.of(step), float(step.settings["decay"])
            columns_K = torch.cat([memory.columns_K, new.columns_K]).unique()
            is_new_K = torch.isin(columns_K, new.columns_K)
            values_DK = torch.where(is_new_K, new.at(columns_K), memory.at(columns_K) * shrink)
            known_N = (new.masks_NP[:, None] == memory.masks_NP).all(2).any(1)  # a prompt that is edited again
            masks = masks.followed_by(new.masks_NP[~known_N])
            memory = ColumnMemory(values_DK, columns_K, masks.content)
            decay *= shrink
        others = {"values": memory.values_DK, "columns": memory.columns_K}
        others |= {name: steps[-1].tensors[name] for name in ("permutation", "background")}
        return sum_of_rows(steps[0].kind, {"masks": masks}, {**settings_of_sum(steps), "decay": decay}, others)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        rows = self.rows_of_edit(index, len(x_RTF), x_RTF.device)
        context, tensors = self.forward_context.to(x_RTF.device), self._tensors[index]
        if context.prefill:
            if self._mask_R is None or len(self._mask_R) != len(x_RTF):
                self._mask_R = torch.full((len(x_RTF),), NO_MASK, device=x_RTF.device)
            self._mask_R[rows] = self._look_up(index, x_RTF, context)[rows]
        if self._mask_R is None:
            return output_RTD
        mask_R = self._mask_R.to(x_RTF.device)[rows]
        if not (mask_R != NO_MASK).any():
            return output_RTD
        changed_RTD = output_RTD.clone()
        chosen = rows[mask_R != NO_MASK]
        # All trained columns in one product, those outside of a row's mask at zero: no copy of the memory per mask.
        in_mask_RF = torch.zeros(len(chosen), x_RTF.shape[2], dtype=torch.bool, device=x_RTF.device)
        in_mask_RF.scatter_(1, tensors["masks"][mask_R[mask_R != NO_MASK]], True)
        columns_K = tensors["columns"]
        x_RTK, values_DK = in_widest_type(x_RTF[chosen][..., columns_K], tensors["values"])
        added = at_least_float32(output_RTD[chosen]) + (x_RTK * in_mask_RF[:, None, columns_K]) @ values_DK.T
        changed_RTD[chosen] = added.to(output_RTD.dtype)
        return changed_RTD

    def _look_up(self, index: int, x_RTF: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Number [R] of the mask of each row's most similar edit, :data:`NO_MASK` below the threshold."""
        tensors, settings = self._tensors[index], self.edits[index].settings
        feature_RF = prompt_features(x_RTF, context, settings["feature"], tensors["background"])
        mask_RP = masks_of(feature_RF, tensors["permutation"], tensors["masks"].shape[1])
        best_R = overlaps(mask_RP, tensors["masks"], x_RTF.shape[2]).max(1)
        return torch.where(best_R.values >= settings["threshold"], best_R.indices, NO_MASK)
