"""Side memories of one linear map: other weights that a row uses when its prompt moves their output far enough.

The memories are those of WISE (``editors/wise.py``). How far a memory W' moves a token is || a(W'x) - a(Wx) ||, a the
model's activation function; a row's distance is the mean over its tokens (the largest token above ``max_over`` tokens).
A memory is used where the distance reaches its threshold times ``act_ratio``. Each row decides for itself, once, from
its prompt, and keeps that while decoding; with ``decide: every_call`` each forward pass decides from the tokens it
feeds, as the released code does.

What a memory stores is W' - W on the entries of its mask, and the mask as bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, target_module
from edit_hooks.modeling.architectures import is_transposed, weight_of
from edit_hooks.modeling.tensors import at_least_float32, pack_bits, unpack_bits
from edit_hooks.utils.errors import EditingError

Decide = Literal["prompt", "every_call"]


Distance = Literal["activation", "plain"]


@dataclass
class Memory:
    """One side memory.

    Attributes:
        number: its name among the memories of an edit.
        change: W' - W, in the stored orientation, at least float32.
        mask: bool, the entries that may differ.
        threshold: smallest mean distance of an edit in it.
    """

    number: int
    change: torch.Tensor
    mask: torch.Tensor
    threshold: float


@dataclass
class Memories:
    """What a stream of edits has written so far.

    Attributes:
        current: the memory that edits go to; ``None`` at the beginning and after it was stored.
        stored: full memories, in order.
        num_edits: edits so far.
        next_number: name of the next memory.
    """

    current: Memory | None
    stored: list[Memory]
    num_edits: int = 0
    next_number: int = 0

    def hook_edit(self, settings: dict[str, Any], changed: set[int]) -> HookEdit:
        """As part of a delta: the memories whose numbers are in ``changed``, and the order and thresholds of all."""
        tensors = {}
        for memory in self.all:
            if memory.number in changed:
                tensors[f"{memory.number}/values"] = memory.change[memory.mask].cpu()
                tensors[f"{memory.number}/mask"] = pack_bits(memory.mask)
        told = {
            "stored": [[memory.number, memory.threshold] for memory in self.stored],
            "current": None if self.current is None else [self.current.number, self.current.threshold],
            "num_edits": self.num_edits,
            "next_number": self.next_number,
        }
        return HookEdit("side_memory", tensors, {**settings, **told})

    @classmethod
    def of(cls, hook_edit: HookEdit | None, weight: torch.Tensor) -> Memories:
        """Read back what :meth:`hook_edit` gave, on the device of ``weight``."""
        if hook_edit is None:
            return cls(None, [])
        settings = hook_edit.settings

        def memory(number: int, threshold: float) -> Memory:
            mask = unpack_bits(hook_edit.tensors[f"{number}/mask"], weight)
            change = torch.zeros(weight.shape, dtype=at_least_float32(weight.new_empty(0)).dtype, device=weight.device)
            change[mask] = hook_edit.tensors[f"{number}/values"].to(change)
            return Memory(number, change, mask, threshold)

        current = None if settings["current"] is None else memory(*settings["current"])
        stored = [memory(*entry) for entry in settings["stored"]]
        return cls(current, stored, settings["num_edits"], settings["next_number"])

    @property
    def all(self) -> list[Memory]:
        """The current memory first, as routing looks at them."""
        return [*([] if self.current is None else [self.current]), *self.stored]


def moved(output: torch.Tensor, other: torch.Tensor, activation: str | None) -> torch.Tensor:
    """|| a(other) - a(output) ||_2 of every token, [r, t], at least float32; ``activation=None``: a is the identity."""
    first, second = at_least_float32(output), at_least_float32(other)
    if activation is not None:
        act = ACT2FN[activation]
        first, second = act(first), act(second)
    return (second - first).norm(dim=-1)


def row_distance(moved_RT: torch.Tensor, counted_RT: torch.Tensor, max_over: int | None = None) -> torch.Tensor:
    """Mean over the counted tokens of each row, [r]; above ``max_over`` of them the largest."""
    count_R = counted_RT.sum(1)
    mean_R = (moved_RT * counted_RT).sum(1) / count_R
    if max_over is None:
        return mean_R
    largest_R = moved_RT.masked_fill(~counted_RT, 0.0).max(1).values
    return torch.where(count_R > max_over, largest_R, mean_R)


def shifted(x: torch.Tensor, output: torch.Tensor, change: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Output of the map with W + change instead of W, at least float32; the bias stays as it is."""
    return at_least_float32(output) + at_least_float32(x) @ (change if transposed else change.T)


class SideMemoryHooks(HookKind):
    """Rows under one set of side memories.

    Settings: ``module``, ``act_ratio``, ``activation`` (or null), ``decide``, ``max_over``, and what
    :meth:`Memories.hook_edit` adds.
    """

    mixes_rows: ClassVar[bool] = False  # the memories are as large as the weight

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        (edit,) = edits
        module = target_module(model, edit)
        self._memories = Memories.of(edit, weight_of(module).detach()).all
        self._has_current = edit.settings["current"] is not None
        self._transposed = is_transposed(module)
        self._choice_R: torch.Tensor | None = None  # decided at prefill; -1: the model's own weight

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        module, settings = target_module(model, hook_edit), hook_edit.settings
        if list(weight_of(module).shape) != settings["shape"]:
            raise EditingError(
                f"the memories of {settings['module']} have shape {settings['shape']}, the model's weight "
                f"{list(weight_of(module).shape)}."
            )

    @classmethod
    def compose(cls, parts: Sequence[HookEdit]) -> HookEdit:
        settings = parts[-1].settings
        numbers = [entry[0] for entry in [settings["current"], *settings["stored"]] if entry is not None]
        tensors = {}
        for part in parts:
            tensors.update(part.tensors)
        kept = {f"{number}/{what}" for number in numbers for what in ("values", "mask")}
        return HookEdit(parts[0].kind, {name: tensor for name, tensor in tensors.items() if name in kept}, settings)

    def transform_output(self, number: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        settings, now = self.edits[number].settings, self.now.to(x_RTF.device)
        if now.prefill or settings["decide"] == "every_call":
            counted_RT = now.prompt_RT if settings["decide"] == "prompt" else now.attended_RT
            self._choice_R = self._choose(x_RTF, output_RTD, counted_RT, settings)
            if self.edit_of_row is not None:
                own_R = (self.edit_of_row == number).to(self._choice_R.device)
                self._choice_R = torch.where(own_R, self._choice_R, -1)
        choice_R = self._choice_R
        if choice_R is None or not (choice_R >= 0).any():
            return output_RTD
        result = output_RTD.clone()
        for index in choice_R.unique().tolist():
            if index >= 0:
                rows = choice_R == index
                other = shifted(x_RTF[rows], output_RTD[rows], self._memories[index].change, self._transposed)
                result[rows] = other.to(output_RTD.dtype)
        return result

    def _choose(
        self, x_RTF: torch.Tensor, output_RTD: torch.Tensor, counted_RT: torch.Tensor, settings: dict[str, Any]
    ) -> torch.Tensor:
        """Which memory each row uses, [r]: the current one where it reaches its threshold, else or beyond that the
        stored one that moves the row most, if it moves it more than the current one."""
        choice_R = torch.full((len(x_RTF),), -1, device=x_RTF.device)
        best_R = torch.zeros(len(x_RTF), device=x_RTF.device, dtype=at_least_float32(x_RTF).dtype)
        for index, memory in enumerate(self._memories):
            other = shifted(x_RTF, output_RTD, memory.change, self._transposed)
            moved_RT = moved(output_RTD, other, settings["activation"])
            distance_R = row_distance(moved_RT, counted_RT, settings["max_over"])
            reaches_R = distance_R >= memory.threshold * settings["act_ratio"]
            if index == 0 and self._has_current:
                choice_R = torch.where(reaches_R, index, choice_R)
                best_R = distance_R  # also where it was rejected, as in the release
            else:
                takes_R = reaches_R & (distance_R > best_R)
                choice_R, best_R = torch.where(takes_R, index, choice_R), torch.where(takes_R, distance_R, best_R)
        return choice_R

    def select(self, rows: torch.Tensor) -> SideMemoryHooks:
        chosen = object.__new__(SideMemoryHooks)
        chosen.__dict__.update(self.__dict__)
        chosen.running = None
        if self.edit_of_row is not None:
            chosen.edit_of_row = self.edit_of_row[rows.to(self.edit_of_row.device)]
        if self._choice_R is not None:
            chosen._choice_R = self._choice_R[rows.to(self._choice_R.device)]
        return chosen
