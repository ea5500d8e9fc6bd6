"""What a stream carries from step to step, and a warning before it no longer fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.editing.joint import steps_of
from edit_hooks.lm.editing.memory_limit import MOST_STREAM_BYTES
from edit_hooks.modeling.memory import free_bytes
from edit_hooks.store.store import Store
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

GIB = 2**30
FIRST_CHECK = 8  # steps; then at every doubling, so that the checks take no time


@dataclass(frozen=True)
class StreamState:
    """What the steps so far leave to the next one.

    Attributes:
        history: as the editor condensed it.
        unseen: checksums of steps that changed nothing, which do not show in the weights.
    """

    num_steps: int = 0
    history: tuple[Delta, ...] = ()
    unseen: tuple[str, ...] = ()
    edits_made: bool = False

    def after(self, delta: Delta, editor: Editor[Any], model: nn.Module) -> StreamState:
        """With one more step; one without a usable request has nothing to carry."""
        if not (delta.writes or delta.stream_state):
            return StreamState(self.num_steps + 1, self.history, self.unseen, self.edits_made)
        history = editor.condensed(model, [*self.history, *steps_of(delta)])
        unseen = self.unseen if delta.writes else (*self.unseen, delta.checksum())
        return StreamState(self.num_steps + 1, tuple(history), unseen, True)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(delta.num_bytes for delta in self.history)


class GrowthWatch:
    """Extrapolates what a stream takes to its last step, and warns once if that does not fit into memory or the store.

    Args:
        bound: what the state that is carried can take at most, if there is a bound.
        store: where the steps go; without one all of them stay in memory.
    """

    def __init__(self, name: str, num_steps: int, bound: int | None, store: Store | None) -> None:
        self._name, self._num_steps, self._bound, self._store = name, num_steps, bound, store
        self._last: tuple[int, int, int] | None = None
        self._memory_fits = self._disk_fits = True

    def check_store(self, num_steps: int, step_bytes: int) -> None:
        """Look at the disk after a step of a size was made and stored."""
        if self._store is not None and self._disk_fits and _is_looked_at(num_steps):
            self._disk_fits = self._store.expect(self._num_steps - num_steps, step_bytes)

    def check(self, carried: StreamState, kept_bytes: int) -> None:
        """Look at the memory after a step.

        Args:
            kept_bytes: size of the steps that stay there.
        """
        now = carried.num_steps
        if not _is_looked_at(now):
            return
        sizes = carried.num_bytes, kept_bytes
        last, self._last = self._last, (now, *sizes)
        if last is None or not self._memory_fits:  # what is there from the first step on does not grow
            return
        reads_steps_again = self._store is not None and self._disk_fits
        bounds = self._bound, max(MOST_STREAM_BYTES, kept_bytes) if reads_steps_again else None
        final = 0.0
        for size, before, bound in zip(sizes, last[1:], bounds, strict=True):
            whole = size + (size - before) / (now - last[0]) * (self._num_steps - now)
            final += whole if bound is None else min(whole, bound)
        num_bytes, free = sum(sizes), free_bytes(torch.device("cpu"))
        if free is not None and final - num_bytes > free:
            self._memory_fits = False
            log.warning(
                "the stream of %s holds %.3g GiB after %d of %d steps and will need %.3g GiB of memory; %.3g GiB are "
                "free. Plan fewer edits, or an editor whose state does not grow (lm-edit editors)%s.",
                self._name,
                num_bytes / GIB,
                now,
                self._num_steps,
                final / GIB,
                free / GIB,
                "" if self._store is not None else "; without store=off, steps are read from the disk",
            )


def _is_looked_at(num_steps: int) -> bool:
    """Whether a stream is looked at after a number of steps: at doublings."""
    return num_steps >= FIRST_CHECK and not num_steps & (num_steps - 1)


def rebuilt(deltas: Sequence[Delta], editor: Editor[Any], model: nn.Module) -> StreamState:
    """The state after some steps, from their whole deltas."""
    carried = StreamState()
    for delta in deltas:
        carried = carried.after(delta, editor, model)
    return carried
