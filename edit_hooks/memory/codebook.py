"""A codebook on one linear map: where a prompt's activation is near a key, the map's output is replaced by a value.

The entries are those of GRACE (``editors/grace.py``): keys are inputs of the module at the last prompt token, values
replace its output, each key has a radius. A row's entry is looked up once, at prefill, at its own last prompt token;
decoding steps keep it. That gives the text of uncached decoding at the speed of cached one. With ``query: every_step``
each new token is looked up on its own, as the released code does when a cache is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from edit_hooks.deltas.hook_edit import ForwardContext, HookEdit, HookKind, check_width, target_module
from edit_hooks.modeling.architectures import weight_of
from edit_hooks.modeling.tensors import at_least_float32

Replacement = Literal["replace_last", "replace_prompt", "replace_all"]


Query = Literal["prefill", "every_step"]


def place(replacement: Replacement, now: ForwardContext) -> torch.Tensor:
    """bool [R, T]: which columns of a prefill pass a value replaces.

    ``replace_last``: the last prompt token; ``replace_prompt``: the prompt tokens before it (it is left out, as in the
    release); ``replace_all``: every token, those after the prompt too.
    """
    columns_T = torch.arange(now.attended_RT.shape[1], device=now.attended_RT.device)
    if replacement == "replace_all":
        return now.attended_RT
    if replacement == "replace_prompt":
        return now.attended_RT & (columns_T < now.prompt_end_R[:, None])
    return columns_T == now.prompt_end_R[:, None]


def distances(query_QF: torch.Tensor, keys_NF: torch.Tensor) -> torch.Tensor:
    """Euclidean distances [q, n] in at least float32, by differences: exact for equal vectors."""
    return torch.cdist(
        at_least_float32(query_QF), at_least_float32(keys_NF), compute_mode="donot_use_mm_for_euclid_dist"
    )


class CodebookHooks(HookKind):
    """Rows under one or several codebooks.

    Tensors: ``keys`` [n, f], ``values`` [n, d], ``radii`` [n], and ``index`` [n], the entries' numbers in the codebook
    (a step of a stream holds only the entries it added or changed). Settings: ``module``, ``replacement``, ``query``,
    and the ``labels`` of the entries (token ids of their targets), which editing needs.
    """

    mixes_rows: ClassVar[bool] = True

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._books = []
        for edit in edits:
            device = weight_of(target_module(model, edit)).device
            self._books.append({name: tensor.to(device) for name, tensor in edit.tensors.items()})
        self._entry_R: torch.Tensor | None = None  # looked up at prefill; -1: none

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        tensors = hook_edit.tensors
        module = target_module(model, hook_edit)
        check_width(module, hook_edit.settings["module"], tensors["values"].shape[1], tensors["keys"].shape[1])

    @classmethod
    def compose(cls, parts: Sequence[HookEdit]) -> HookEdit:
        entries: dict[int, tuple[Any, ...]] = {}
        for part in parts:
            columns = (part.tensors["keys"], part.tensors["values"], part.tensors["radii"], part.settings["labels"])
            entries.update(zip(part.tensors["index"].tolist(), zip(*columns, strict=True), strict=True))
        numbers = sorted(entries)
        keys, values, radii, labels = zip(*(entries[number] for number in numbers), strict=True)
        tensors = {"keys": torch.stack(keys), "values": torch.stack(values), "radii": torch.stack(radii)}
        index = torch.tensor(numbers)
        return HookEdit(parts[0].kind, {**tensors, "index": index}, {**parts[-1].settings, "labels": list(labels)})

    def transform_output(self, number: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        now, settings = self.now.to(x_RTF.device), self.edits[number].settings
        rows = self.rows(number, len(x_RTF), x_RTF.device)
        if self._entry_R is None or (now.prefill and len(self._entry_R) != len(x_RTF)):
            self._entry_R = torch.full((len(x_RTF),), -1, device=x_RTF.device)
        every_step = settings["query"] == "every_step"
        entry_RT = torch.full(x_RTF.shape[:2], -1, device=x_RTF.device)
        if now.prefill:
            found_R = self._look_up(number, x_RTF[rows, now.prompt_end_R[rows]])
            self._entry_R[rows] = found_R
            entry_RT[rows] = torch.where(place(settings["replacement"], now)[rows], found_R[:, None], -1)
            if every_step:
                self._look_up_continuation(number, rows, x_RTF, entry_RT)
        elif settings["replacement"] == "replace_all" and not every_step:
            entry_RT[rows, 0] = self._entry_R[rows]
        elif settings["replacement"] != "replace_prompt" and every_step:
            entry_RT[rows, 0] = self._look_up(number, x_RTF[rows, 0])
        hit_RT = entry_RT >= 0
        if not hit_RT.any():
            return output_RTD
        replaced = output_RTD.clone()
        replaced[hit_RT] = self._books[number]["values"][entry_RT[hit_RT]].to(output_RTD.dtype)
        return replaced

    def _look_up(self, number: int, query_QF: torch.Tensor) -> torch.Tensor:
        """Entry [q] within whose radius each query is, -1 for none; the nearest key counts."""
        book = self._books[number]
        nearest_Q = distances(query_QF, book["keys"]).min(1)
        hit_Q = nearest_Q.values <= book["radii"][nearest_Q.indices]
        return torch.where(hit_Q, nearest_Q.indices, -1)

    def _look_up_continuation(
        self, number: int, rows: torch.Tensor, x_RTF: torch.Tensor, entry_RT: torch.Tensor
    ) -> None:
        """Teacher forcing with a look-up at every step: each token after the prompt on its own, as in decoding."""
        now = self.now.to(x_RTF.device)
        after_RT = torch.zeros_like(now.attended_RT)
        after_RT[rows] = (now.attended_RT & ~now.prompt_RT)[rows]
        if not after_RT.any():
            return
        replaces = self.edits[number].settings["replacement"] != "replace_prompt"
        entry_RT[after_RT] = self._look_up(number, x_RTF[after_RT]) if replaces else -1

    def select(self, rows: torch.Tensor) -> CodebookHooks:
        chosen = object.__new__(CodebookHooks)
        chosen.__dict__.update(self.__dict__)
        chosen.running = None
        if self.edit_of_row is not None:
            chosen.edit_of_row = self.edit_of_row[rows.to(self.edit_of_row.device)]
        if self._entry_R is not None:
            chosen._entry_R = self._entry_R[rows.to(self._entry_R.device)]
        return chosen
