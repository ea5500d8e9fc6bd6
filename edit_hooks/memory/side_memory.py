"""Side memories of one linear map: alternative weights for rows whose prompt shifts the map's output far enough.

The memories are those of WISE (``editors/wise.py``). A memory W' shifts a token by || a(W' x) - a(W x) ||, a the
model's activation function. A row's distance is the mean shift of its tokens (the largest one above ``max_over``
tokens). A memory can be used if the distance reaches its threshold times ``act_ratio``. The choice is made per row,
once, from the prompt, and holds while decoding; with ``decide: every_call`` each forward pass chooses from the tokens
it is fed, as the released code does.

A memory is stored as W' - W on the entries of its mask, and the mask as bits. Outside the mask W' is W, or what weight
decay left of it: W' - W is then -``shrink`` W there, clipped to ``radius``.

Shapes: R rows, T tokens of the pass, F and D input and output width of the map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from transformers.activations import ACT2FN

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.deltas.schema import (
    INDEX,
    Record,
    Schema,
    Tensor,
    anything,
    list_of,
    nullable,
    number,
    one_of,
    require_distinct,
    text,
    whole,
)
from edit_hooks.memory.replay import PAD, PastEdits
from edit_hooks.memory.steps import STEP_NUMBERS, settings_of_sum
from edit_hooks.modeling.architectures import is_transposed, map_shape
from edit_hooks.modeling.tensors import at_least_float32, pack_bits, unpack_bits
from edit_hooks.modeling.weights import read_weight
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE, SHARE, Range

Decide = Literal["prompt", "every_call"]
Distance = Literal["activation", "plain"]

NO_MEMORY = -1
EDITS = "edits"  # prefix of the tensors with the rows of past edits


@dataclass
class Memory:
    """One side memory.

    Attributes:
        number: its number among the memories of a stream.
        change: W' - W, in the stored orientation, at least float32.
        mask: bool, the entries that edits train.
        threshold: smallest distance of an edit in it.
        shrink: share of W that weight decay took from the entries outside the mask.
        radius: bound of |W' - W| on these; ``None``: none.
    """

    number: int
    change: torch.Tensor
    mask: torch.Tensor
    threshold: float
    shrink: float = 0.0
    radius: float | None = None

    @property
    def entry(self) -> list[Any]:
        """All but the tensors, JSON-able."""
        return [self.number, self.threshold, self.shrink, self.radius]


class PackedMemory(Memory):
    """A memory of an edit, whose tensors are formed where they are read.

    An edit trains the current memory; it reads the stored ones, each as large as the weight, where it merges them.
    """

    def __init__(
        self,
        hook_edit: HookEdit,
        weight: torch.Tensor,
        number: int,
        threshold: float,
        shrink: float,
        radius: float | None,
    ) -> None:
        self.number, self.threshold, self.shrink, self.radius = number, threshold, shrink, radius
        self._packed = hook_edit, weight

    def __getattr__(self, name: str) -> torch.Tensor:
        """Form a tensor at its first use."""
        if name not in ("mask", "change"):
            raise AttributeError(name)
        hook_edit, weight = self._packed
        if name == "mask":
            self.mask = unpack_bits(hook_edit.tensors[f"{self.number}/mask"], weight)
            return self.mask
        change = shrunk(weight, self.shrink, self.radius)
        change[self.mask] = hook_edit.tensors[f"{self.number}/values"].to(change)
        self.change = change
        return change


@dataclass
class MemoryBank:
    """The side memories after some edits of a stream.

    Attributes:
        current: the memory that receives edits; ``None`` at the start and after it was stored.
        stored: full memories, in order.
        num_edits: number of edits so far.
        next_number: number of the next memory.
        past: the edits' rows, for replay.
    """

    current: Memory | None
    stored: list[Memory]
    num_edits: int = 0
    next_number: int = 0
    past: PastEdits = field(default_factory=lambda: PastEdits([], []))

    @property
    def memories(self) -> list[Memory]:
        """All memories in routing order: the current one first."""
        return [*([] if self.current is None else [self.current]), *self.stored]

    def to_hook_edit(self, settings: dict[str, Any], changed: set[int]) -> HookEdit:
        """A step of a stream: the memories whose numbers are in ``changed``, the last edit's rows, and state of all."""
        tensors = {}
        for memory in self.memories:
            if memory.number in changed:
                tensors[f"{memory.number}/values"] = memory.change[memory.mask].cpu()
                tensors[f"{memory.number}/mask"] = pack_bits(memory.mask)
        state: dict[str, Any] = {
            "stored": [memory.entry for memory in self.stored],
            "current": None if self.current is None else self.current.entry,
            "num_edits": self.num_edits,
            "next_number": self.next_number,
        }
        if self.past.rows:
            tensors[f"{EDITS}/{len(self.past.rows) - 1}"] = self.past.rows[-1]
            state["turns"] = self.past.turns
        return HookEdit("side_memory", tensors, {**settings, **state})

    @classmethod
    def from_hook_edit(cls, hook_edit: HookEdit | None, weight: torch.Tensor) -> MemoryBank:
        """The memories of a hook edit, on the device of the map's ``weight``; empty for ``None``."""
        if hook_edit is None:
            return cls(None, [])
        settings, entry = hook_edit.settings, hook_edit.settings["current"]
        current = None if entry is None else PackedMemory(hook_edit, weight, *entry)
        stored: list[Memory] = [PackedMemory(hook_edit, weight, *entry) for entry in settings["stored"]]
        num_rows = sum(name.startswith(f"{EDITS}/") for name in hook_edit.tensors)
        rows = [hook_edit.tensors[f"{EDITS}/{number}"] for number in range(num_rows)]
        past = PastEdits(rows, list(settings.get("turns", [])))
        return cls(current, stored, settings["num_edits"], settings["next_number"], past)


def shrunk(weight: torch.Tensor, shrink: float, radius: float | None) -> torch.Tensor:
    """-``shrink`` W, at least float32, clipped to ``radius``: W' - W of entries that only weight decay changed."""
    change = at_least_float32(weight) * -shrink
    return change if radius is None else change.clamp_(-radius, radius)


def activation_shift(output_RTD: torch.Tensor, other_RTD: torch.Tensor, activation: str | None) -> torch.Tensor:
    """|| a(other) - a(output) ||_2 of every token, [R, T], at least float32; ``activation=None``: a is the identity."""
    output_RTD, other_RTD = at_least_float32(output_RTD), at_least_float32(other_RTD)
    if activation is not None:
        act = ACT2FN[activation]
        output_RTD, other_RTD = act(output_RTD), act(other_RTD)
    return (other_RTD - output_RTD).norm(dim=-1)


def row_distance(shift_RT: torch.Tensor, counted_RT: torch.Tensor, max_over: int | None = None) -> torch.Tensor:
    """Mean shift [R] of each row's counted tokens; the largest one for rows with more than ``max_over`` of them."""
    count_R = counted_RT.sum(1)
    mean_R = (shift_RT * counted_RT).sum(1) / count_R
    if max_over is None:
        return mean_R
    largest_R = shift_RT.masked_fill(~counted_RT, 0.0).max(1).values
    return torch.where(count_R > max_over, largest_R, mean_R)


def output_with_delta(
    x_RTF: torch.Tensor, output_RTD: torch.Tensor, change: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Output of the map with W + change, from its output with W, at least float32; the bias is unchanged."""
    return at_least_float32(output_RTD) + at_least_float32(x_RTF) @ (change if transposed else change.T)


def _check_entry(what: str, value: Any) -> None:
    """An entry of a memory: its number, threshold, shrink and radius."""
    list_of(anything)(what, value)
    parts = {
        "number": whole(),
        "threshold": number(),
        "shrink": number(SHARE),
        "radius": nullable(number(Range("zero or a positive number of 32 bits", least=0, most=torch.finfo().max))),
    }
    if len(value) != len(parts):
        raise EditingError(f"{what} has {len(value)} entries; {', '.join(parts)} are needed.")
    for (name, check), entry in zip(parts.items(), value, strict=True):
        check(f"{what}.{name}", entry)


def _entries(hook_edit: HookEdit) -> list[list[Any]]:
    """The entries of all memories."""
    current = hook_edit.settings["current"]
    return [*hook_edit.settings["stored"], *([] if current is None else [current])]


class SideMemoryHooks(HookKind):
    """Rows under one set of side memories.

    Settings: ``module``, ``shape`` (of the weight), ``act_ratio``, ``activation`` (or null), ``decide``, ``max_over``,
    ``num_before`` (:mod:`edit_hooks.memory.steps`), and those that :meth:`MemoryBank.to_hook_edit` adds.
    """

    mixes_rows: ClassVar[bool] = False  # a memory is as large as the weight
    row_state: ClassVar[tuple[str, ...]] = ("_choice_R",)
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "shape": list_of(whole(POSITIVE), 2),
                "act_ratio": number(),
                "activation": nullable(one_of(*ACT2FN)),
                "decide": one_of(*get_args(Decide)),
                "max_over": nullable(whole()),
                "stored": list_of(_check_entry),
                "current": nullable(_check_entry),
                "next_number": whole(),
                **STEP_NUMBERS,
            },
            {"turns": list_of(whole())},
        ),
        families={
            rf"{INDEX}/values": Tensor("_"),
            rf"{INDEX}/mask": Tensor("_", "bits"),
            rf"{EDITS}/{INDEX}": Tensor("_ _", "whole", Range("a token id, or -1", least=PAD)),
        },
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        (edit,) = edits
        self._check_whole(edit)
        module = target_module(model, edit)
        self._memories = MemoryBank.from_hook_edit(edit, read_weight(module)).memories
        self._has_current = edit.settings["current"] is not None
        self._transposed = is_transposed(module)
        self._choice_R: torch.Tensor | None = None  # index of each row's memory, chosen at prefill

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        tensors, numbers = hook_edit.tensors, [entry[0] for entry in _entries(hook_edit)]
        require_distinct("settings.stored", numbers)
        size = math.prod(hook_edit.settings["shape"])
        for name in tensors:
            number, _, part = name.partition("/")
            if number == EDITS:
                continue
            if int(number) not in numbers:
                raise EditingError(f"tensor {name} is of a memory that settings.stored and settings.current lack.")
            other = f"{number}/{'mask' if part == 'values' else 'values'}"
            if other not in tensors:
                raise EditingError(f"tensor {other} is missing.")
            if part == "mask":
                Tensor(str(-(-size // 8)), "bits").check(name, tensors[name], {})
                num_trained = int(unpack_bits(tensors[name], torch.empty(size, dtype=torch.uint8)).sum())
                Tensor(str(num_trained)).check(other, tensors[other], {})

    @staticmethod
    def _check_whole(hook_edit: HookEdit) -> None:
        names = [f"{entry[0]}/values" for entry in _entries(hook_edit)]
        num_rows = sum(name.startswith(f"{EDITS}/") for name in hook_edit.tensors)
        names += [f"{EDITS}/{number}" for number in range(num_rows)]
        if missing := [name for name in names if name not in hook_edit.tensors]:
            raise EditingError(
                f"the edit lacks tensor {missing[0]}, which an earlier step of its stream has; give the whole stream."
            )

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        module, settings = target_module(model, hook_edit), hook_edit.settings
        rows, columns = map_shape(module)
        check_width(module, settings["module"], rows, columns)
        shape = [columns, rows] if is_transposed(module) else [rows, columns]
        if shape != settings["shape"]:
            raise EditingError(
                f"the memories of {settings['module']} have shape {settings['shape']}, the model's weight {shape}."
            )

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The memories that exist after the last step, each as the last step that changed it left it."""
        settings = settings_of_sum(steps)
        numbers = [entry[0] for entry in [settings["current"], *settings["stored"]] if entry is not None]
        tensors = {name: tensor for step in steps for name, tensor in step.tensors.items()}
        names = {f"{number}/{part}" for number in numbers for part in ("values", "mask")}
        names |= {name for name in tensors if name.startswith(f"{EDITS}/")}
        return HookEdit(steps[0].kind, {name: tensor for name, tensor in tensors.items() if name in names}, settings)

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        settings, context = self.edits[index].settings, self.forward_context.to(x_RTF.device)
        if context.prefill or settings["decide"] == "every_call":
            counted_RT = context.prompt_RT if settings["decide"] == "prompt" else context.attended_RT
            self._choice_R = self._choose(x_RTF, output_RTD, counted_RT, settings)
            if self.edit_of_row is not None:
                is_edited_R = (self.edit_of_row == index).to(self._choice_R.device)
                self._choice_R = torch.where(is_edited_R, self._choice_R, NO_MEMORY)
        choice_R = self._choice_R
        if choice_R is None or not (choice_R != NO_MEMORY).any():
            return output_RTD
        result_RTD = output_RTD.clone()
        for choice in choice_R.unique().tolist():
            if choice != NO_MEMORY:
                rows = choice_R == choice
                change = self._memories[choice].change
                other_RTD = output_with_delta(x_RTF[rows], output_RTD[rows], change, self._transposed)
                result_RTD[rows] = other_RTD.to(output_RTD.dtype)
        return result_RTD

    def _choose(
        self, x_RTF: torch.Tensor, output_RTD: torch.Tensor, counted_RT: torch.Tensor, settings: dict[str, Any]
    ) -> torch.Tensor:
        """Index [R] of each row's memory, :data:`NO_MEMORY` for the model's own weight.

        The current memory is chosen if it reaches its threshold. The stored memory with the largest distance is chosen
        instead if it reaches its own threshold and that distance exceeds the current memory's.
        """
        choice_R = torch.full((len(x_RTF),), NO_MEMORY, device=x_RTF.device)
        best_R = torch.zeros(len(x_RTF), device=x_RTF.device, dtype=at_least_float32(x_RTF).dtype)
        for index, memory in enumerate(self._memories):
            other_RTD = output_with_delta(x_RTF, output_RTD, memory.change, self._transposed)
            shift_RT = activation_shift(output_RTD, other_RTD, settings["activation"])
            distance_R = row_distance(shift_RT, counted_RT, settings["max_over"])
            reaches_R = distance_R >= memory.threshold * settings["act_ratio"]
            if index == 0 and self._has_current:
                choice_R = torch.where(reaches_R, index, choice_R)
                best_R = distance_R  # also for rows that rejected it, as in the release
            else:
                is_better_R = reaches_R & (distance_R > best_R)
                choice_R = torch.where(is_better_R, index, choice_R)
                best_R = torch.where(is_better_R, distance_R, best_R)
        return choice_R
