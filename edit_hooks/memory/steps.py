"""Steps of a memory: each one goes on from what the steps before it left.

An edit of a memory contains what it added or replaced, so of two edits that were made independently the later one would
silently replace the earlier. Edits therefore record how many the memory held before them (:data:`NUM_BEFORE`) and after
them.

Most memories are tables: rows with numbers, of which a step holds those that it added or changed. The sum of their
tables is :class:`NumberedRows`. The sum of a stream grows by a few rows per step, so its tensors lie in memory that has
room for more of them, and a step is written behind the others: the rows so far are not copied, unless a step changes or
removes one of them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.schema import whole
from edit_hooks.utils.errors import EditingError

NUM_BEFORE, NUM_EDITS = "num_before", "num_edits"
STEP_NUMBERS = {NUM_BEFORE: whole(), NUM_EDITS: whole()}  # for the schemas of kinds
GONE = -1  # in place of the row of a number that was removed


def step_numbers(earlier: HookEdit | None) -> dict[str, int]:
    """Settings of an edit after ``earlier``."""
    before = 0 if earlier is None else earlier.settings[NUM_EDITS]
    return {NUM_BEFORE: before, NUM_EDITS: before + 1}


def settings_of_sum(steps: Sequence[HookEdit]) -> dict[str, Any]:
    """The settings of steps as one: those of the last, which begins where the first one does.

    Raises:
        EditingError: for a step that does not go on from the one before it.
    """
    for earlier, step in itertools.pairwise(steps):
        held, before = earlier.settings[NUM_EDITS], step.settings[NUM_BEFORE]
        if held != before:
            raise EditingError(
                f"edits of a {step.kind} at {step.settings['module']} do not go on from one another: one was made on "
                f"{before} earlier edits and follows {held}, which it would replace in part. Make them as a stream: "
                "mode=sequential, or Editor.edit(..., history=<the earlier edits>)."
            )
    return {**steps[-1].settings, NUM_BEFORE: steps[0].settings[NUM_BEFORE]}


# -- tables ------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A tensor at the start of a larger one, which has room for more rows.

    Attributes:
        content: the rows, a view of ``memory``.
        memory: rows that were written are never written again, so every view of them stays as it is.
        num_written: of ``memory``, in a list of one number that all views share.
    """

    content: torch.Tensor
    memory: torch.Tensor
    num_written: list[int]

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], kept_N: torch.Tensor | None = None) -> Rows:
        """A copy of the rows of some tensors, or of ``kept_N`` among them, with room for half as many."""
        size = sum(map(len, parts)) if kept_N is None else len(kept_N)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        with torch.inference_mode(False):  # later rows can be written in any mode
            memory = torch.empty(size + size // 2 + 1, *parts[0].shape[1:], dtype=dtype, device=parts[0].device)
        content = memory[:size]
        if kept_N is None:
            torch.cat(list(parts), out=content)
        else:
            torch.index_select(torch.cat(list(parts)), 0, kept_N, out=content)
        return cls(content, memory, [size])

    def followed_by(self, rows: torch.Tensor) -> Rows:
        """These rows and more of them; written behind these if nothing else was, and if there is room."""
        before, after = len(self.content), len(self.content) + len(rows)
        alike = rows.dtype == self.memory.dtype and rows.shape[1:] == self.memory.shape[1:]
        if self.num_written[0] != before or after > len(self.memory) or not alike:
            return Rows.of([self.content, rows])
        self.memory[before:after] = rows
        self.num_written[0] = after
        return Rows(self.memory[:after], self.memory, self.num_written)


# By a sum of steps: the rows behind its tensors, by name. Other edits have tensors without room.
_rows_of: weakref.WeakKeyDictionary[HookEdit, dict[str, Rows]] = weakref.WeakKeyDictionary()


def rows_of(edit: HookEdit, name: str) -> Rows:
    """The rows of one tensor; a copy if the edit is not a sum."""
    return _rows_of.get(edit, {}).get(name) or Rows.of([edit.tensors[name]])


def sum_of_rows(
    kind: str, rows: Mapping[str, Rows], settings: dict[str, Any], others: Mapping[str, torch.Tensor] | None = None
) -> HookEdit:
    """An edit of rows that can be followed by more, and of other tensors."""
    edit = HookEdit(kind, {**{name: one.content for name, one in rows.items()}, **(others or {})}, settings)
    _rows_of[edit] = dict(rows)
    return edit


@dataclass(frozen=True)
class NumberedRows:
    """The rows of the tables of steps, by ascending number, each as the last step that changed it left it.

    Attributes:
        rows: by name of the tensor; the one of the numbers, too.
        removed: the numbers that steps removed, ascending.
    """

    rows: dict[str, Rows]
    removed: list[int]
    _numbers: str
    _steps: Sequence[HookEdit] = field(repr=False)
    _kept_N: torch.Tensor | None = field(repr=False)  # positions among the rows of all steps; None: all of them

    @classmethod
    def of(
        cls, steps: Sequence[HookEdit], numbers: str, columns: Sequence[str], removed: str | None = None
    ) -> NumberedRows:
        """The table after some steps.

        Args:
            numbers: the tensor of the rows' numbers. columns: the other tensors, with an entry per row.
            removed: the setting with the numbers that a step removes.

        Raises:
            EditingError: for steps whose rows have different shapes.
        """
        names = [numbers, *columns]
        _require_same_shapes(steps, names)
        gone = [step.settings[removed] if removed else [] for step in steps]
        if _only_adds(steps, numbers, gone):
            first, second = steps
            added = {name: rows_of(first, name).followed_by(second.tensors[name]) for name in names}
            return cls(added, gone[0], numbers, steps, None)
        # Every row and every removal, in order: the number, and the row among those of all steps.
        number_N, row_N, num_rows = list[torch.Tensor](), list[torch.Tensor](), 0
        for step, gone_here in zip(steps, gone, strict=True):
            own, lost = step.tensors[numbers], torch.tensor(gone_here, dtype=torch.int64)
            number_N += [own, lost]
            row_N += [torch.arange(num_rows, num_rows + len(own)), torch.full_like(lost, GONE)]
            num_rows += len(own)
        all_N, last_row_N = torch.cat(number_N), torch.cat(row_N)
        last_N = last_of_each(all_N)
        all_N, last_row_N = all_N[last_N], last_row_N[last_N]
        kept_N = last_row_N[last_row_N != GONE]
        rows = {name: Rows.of([step.tensors[name] for step in steps], kept_N) for name in names}
        return cls(rows, all_N[last_row_N == GONE].tolist(), numbers, steps, kept_N)

    @property
    def numbers_N(self) -> torch.Tensor:
        """The numbers of the rows, ascending."""
        return self.rows[self._numbers].content

    def rows_with(self, number_M: torch.Tensor) -> dict[str, Rows]:
        """Those of the rows whose numbers are among some."""
        is_kept_N = torch.isin(self.numbers_N, number_M)
        if is_kept_N.all():
            return self.rows
        return {name: Rows.of([one.content], is_kept_N.nonzero()[:, 0]) for name, one in self.rows.items()}

    def entries(self, setting: str) -> list[Any]:
        """The entries of a setting that has one for every row."""
        entries = [entry for step in self._steps for entry in step.settings[setting]]
        return entries if self._kept_N is None else [entries[position] for position in self._kept_N.tolist()]


def _require_same_shapes(steps: Sequence[HookEdit], names: Sequence[str]) -> None:
    """Refuse steps that were made with different settings, as two ranks of adapters."""
    for name in names:
        shapes = {tuple(step.tensors[name].shape[1:]) for step in steps}
        if len(shapes) > 1:
            raise EditingError(
                f"steps of one {steps[0].kind} have rows of different shapes in {name}: "
                f"{' and '.join(map(str, sorted(shapes)))}; a stream has one model and one configuration throughout."
            )


def _only_adds(steps: Sequence[HookEdit], numbers: str, gone: Sequence[Sequence[int]]) -> bool:
    """Whether the second of two steps removes nothing and has higher numbers than the first, which is a sum.

    A sum has its numbers, and those that it has removed, in ascending order.
    """
    if len(steps) != 2 or gone[1] or numbers not in _rows_of.get(steps[0], {}):
        return False
    first_N, second_N = (step.tensors[numbers] for step in steps)
    so_far = max([*first_N[-1:].tolist(), *gone[0][-1:]], default=-1)
    return bool((second_N > so_far).all() and (second_N.diff() > 0).all())


def last_of_each(number_N: torch.Tensor) -> torch.Tensor:
    """Position of the last occurrence of every number, by ascending number."""
    distinct_M, place_N = number_N.unique(return_inverse=True)
    positions_N = torch.arange(len(number_N))
    return torch.zeros_like(distinct_M).scatter_reduce_(0, place_N, positions_N, "amax")
