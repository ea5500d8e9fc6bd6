"""States of an edit's trainings in the store of a run, until the edit is done."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import off_device
from edit_hooks.edit_report import Cost
from edit_hooks.gradient.stepping.kept_training import trainings_kept_in
from edit_hooks.lm.editing.cost import KeptParts
from edit_hooks.modeling.memory import free_bytes
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import size_text

log = get_logger("lm_eval.edited_hf")

HOST_COPIES = 2  # of a state while it is written: from a GPU, and for the file


@contextlib.contextmanager
def trainings_of(store: Store | None, edit: Description) -> Iterator[StoredTrainings | None]:
    """Scope that computes and stores an edit; at its end the states of its trainings are removed.

    An interrupt, as any exception, leaves them for the next run.
    """
    if store is None:
        yield None
        return
    trainings = StoredTrainings(edit, store)
    yield trainings
    trainings.remove()


@dataclass
class StoredTrainings(KeptParts):
    """One file per training, found by the description of the edit and the number of the training in it."""

    edit: Description
    store: Store
    num_begun: int = 0
    files: dict[int, Description] = field(default_factory=dict)

    def scope(self) -> AbstractContextManager[None]:
        return trainings_kept_in(self)

    def begin(self) -> int:
        self.num_begun += 1
        return self.num_begun - 1

    def load(self, number: int) -> Delta | None:
        state = self.store.load_training(self._description(number))
        if state is not None:
            self.files[number] = self._description(number)
        return state

    def save(self, number: int, state: Delta) -> float:
        began = time.monotonic()
        self.files.setdefault(number, self._description(number))
        state.cost = Cost(seconds=state.cost.seconds, peak_memory_gib=self.memory().peak_memory_gib)
        with contextlib.suppress(EditingError):  # not finite: no reader accepts it, and so will the edit not be
            self.store.save_training(self.files[number], off_device(state))
        took = time.monotonic() - began
        self.seconds -= took  # an edit costs the same whether its states are kept or not
        return took

    def has_room(self, num_bytes: int) -> bool:
        on_host = free_bytes(torch.device("cpu"))
        fits = self.store.has_room(num_bytes) and (on_host is None or HOST_COPIES * num_bytes <= on_host)
        if not fits:
            log.warning(
                "the state of this training, %s, is not kept%s: the disk of the store %s or the memory has no room for "
                "it. If the run is interrupted, this edit %s.",
                *(size_text(num_bytes), " any longer" if self.files else "", self.store.root),
                "goes on from an earlier state" if self.files else "begins again",
            )
        elif not self.files:
            log.info(
                "the state of this training, %s, is kept in the store %s until the edit is done; if the run is "
                "interrupted, the same command goes on from it.",
                *(size_text(num_bytes), self.store.root),
            )
        return fits

    def resumed(self, cost: Cost) -> None:
        self.found(cost)

    def remove(self) -> None:
        """Remove the states: the edit is done."""
        for description in self.files.values():
            self.store.remove_training(description)

    def _description(self, number: int) -> Description:
        inputs = {"edit": self._key, "training": number}
        return Description(what="unfinished training", model={}, code="", inputs=inputs)

    @functools.cached_property
    def _key(self) -> str:
        """Of the edit: it covers the model and the code."""
        return self.edit.key
