"""States of long trainings, kept so that an interrupted run goes on to the weights of an unbroken one, bit for bit.

A joint edit of thousands of facts trains for minutes on a GPU and for hours on a CPU. A runner names the place with
:func:`trainings_kept_in`, for one edit; the place knows all that the edit depends on. A state holds what the steps of a
loop change: trained tensors, the optimizer's moments, generators, and a record of the loop. All else, as cached hidden
states, is computed again.

States are written between two steps, never in a recorded one (:mod:`edit_hooks.modeling.device.recording`), and from
copies on the CPU that were waited for. A training of less than :data:`INTERVAL` seconds writes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import Cost
from edit_hooks.modeling.fingerprint.tensor_hash import sampled_digest
from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.hashing import key_of

log = get_logger("lm_eval.edited_hf")

INTERVAL = 60.0  # seconds between two states at least
SPACING = 20  # times the seconds of a write must have passed before the next one: writing takes at most a twentieth
WRITTEN_PER_SECOND = 2**29  # bytes, until a write was timed
COPIES = 3  # of the trained tensors: themselves and two moments of Adam
LEAF, MOMENT, GENERATOR = "leaf", "moment", "generator"  # prefixes of tensors
RECORD, FINGERPRINT = "record", "training"  # in the metadata


class TrainingStore(Protocol):
    """A place of the unfinished trainings of one edit, which are numbered as they begin.

    A state is a delta without updates: tensors in ``stream_state``, the rest in ``meta``.
    """

    def begin(self) -> int:
        """The number of a training that begins now."""

    def load(self, number: int) -> Delta | None:
        """The last state of a training; ``None`` without one."""

    def save(self, number: int, state: Delta) -> float:
        """Save a state in place of the last one; the seconds that it took."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether a state of this size can be kept; if not, that is logged."""

    def resumed(self, cost: Cost) -> None:
        """A training goes on from a state that cost this."""


_PLACE: ContextVar[TrainingStore | None] = ContextVar("trainings_kept_in", default=None)


@contextlib.contextmanager
def trainings_kept_in(place: TrainingStore | None) -> Iterator[None]:
    """Keep the states of trainings inside the block, and go on from those that were kept before."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


class KeptTraining:
    """The states of one training.

    Args:
        model: its weights do not change while the copies are trained.
        optimizer: of the trained tensors.
        rows: the texts of the training, JSON-able.
        generators: those that the steps draw from.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[Any],
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._model, self._optimizer, self._rows, self._generators = model, optimizer, rows, generators
        self._leaves: list[torch.Tensor] = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        self._place = _PLACE.get()
        self._number = self._place.begin() if self._place else 0
        self._began, self._seconds_before = time.monotonic(), 0.0
        estimate = COPIES * sum(leaf.nbytes for leaf in self._leaves) / WRITTEN_PER_SECOND
        self._due = self._began + max(INTERVAL, SPACING * estimate)

    def resume(self) -> dict[str, Any]:
        """Set the trained tensors, moments and generators to the last state.

        Returns:
            The record of that state; empty if the training begins.
        """
        state = self._place.load(self._number) if self._place else None
        if state is None or self._place is None:
            return {}
        if state.meta.get(FINGERPRINT) != self._fingerprint():
            log.warning("the stored state of an interrupted training is of other texts or weights; it begins again.")
            return {}
        self._restore(state.stream_state)
        self._seconds_before = state.cost.seconds or 0.0
        self._place.resumed(state.cost)
        log.info("an interrupted training goes on: %s of it are done.", spell_duration(self._seconds_before))
        record: dict[str, Any] = state.meta[RECORD]
        return record

    def after_step(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """Write the state if it is time to; call it where a step has ended.

        Args:
            record: what else the loop needs to go on, JSON-able.
        """
        if self._place is None or time.monotonic() < self._due:
            return
        tensors = self._tensors()
        if not self._place.has_room(sum(tensor.nbytes for tensor in tensors.values())):
            self._place = None
            return
        meta = {RECORD: dict(record()), FINGERPRINT: self._fingerprint()}
        seconds = self._seconds_before + time.monotonic() - self._began
        took = self._place.save(self._number, Delta(stream_state=tensors, meta=meta, cost=Cost(seconds=seconds)))
        self._began += took
        self._due = time.monotonic() + max(INTERVAL, SPACING * took)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What the steps change."""
        tensors = {}
        for index, leaf in enumerate(self._leaves):
            tensors[f"{LEAF}/{index}"] = leaf.detach()
            for name, value in self._optimizer.state.get(leaf, {}).items():
                tensors[f"{MOMENT}/{index}/{name}"] = value
        return tensors | {f"{GENERATOR}/{index}": one.get_state() for index, one in enumerate(self._generators)}

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for path, tensor in tensors.items():
            kind, index, *name = path.split("/")
            number = int(index)
            if kind == LEAF:
                self._leaves[number].copy_(tensor)
            elif kind == GENERATOR:
                self._generators[number].set_state(tensor)
            else:
                # Fused optimizers read moments as flat memory, in the layout of the leaf.
                leaf = self._leaves[number]
                own = torch.empty_like(leaf).copy_(tensor) if tensor.shape == leaf.shape else tensor
                moments.setdefault(number, {})[name[0]] = own
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})

    def _fingerprint(self) -> str:
        """Tells apart trainings of one edit: by their texts, tensors, optimizer, and the weights beneath."""
        leaves = [[list(leaf.shape), str(leaf.dtype), leaf.device.type] for leaf in self._leaves]
        is_fused = bool(self._optimizer.defaults.get("fused"))
        return key_of([self._rows, leaves, is_fused, sampled_digest(self._model)])
