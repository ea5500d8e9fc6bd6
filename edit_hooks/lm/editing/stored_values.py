"""Solved values of locate-then-edit editors in the store of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edit_hooks.edit_report import Cost
from edit_hooks.locate.values import value_optimization
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.storage.hashing import code_fingerprint

KIND = "values"  # of entries of the store


@dataclass
class StoredValues:
    """Values of a model in a store, and what those that are found took when they were solved.

    An edit costs the same whether its values are found or not, so a table of times does not depend on the order of its
    rows. See :func:`~edit_hooks.lm.editing.cost.measured`.

    Attributes:
        memory: reads the peak of the GPU memory so far.
        seconds, peak_memory_gib: of the found values.
    """

    store: Store
    identity: ModelIdentity
    memory: Callable[[], Cost] = Cost
    seconds: float = 0.0
    peak_memory_gib: float = 0.0

    @classmethod
    def of(cls, store: Store | None, identity: ModelIdentity) -> StoredValues | None:
        """``None`` without a store."""
        return cls(store, identity) if store else None

    def load(self, inputs: Mapping[str, Any]) -> Any | None:
        found = self.store.load_json(KIND, self._description(inputs))
        if found is None:
            return None
        self.seconds += found["seconds"]
        self.peak_memory_gib = max(self.peak_memory_gib, found["peak_memory_gib"] or 0.0)
        return found["values"]

    def save(self, inputs: Mapping[str, Any], content: Any, seconds: float) -> None:
        record = {"values": content, "seconds": seconds, "peak_memory_gib": self.memory().peak_memory_gib}
        self.store.save_json(KIND, self._description(inputs), record)

    def added_to(self, cost: Cost) -> Cost:
        """A cost with the memory of the found values."""
        peak = cost.peak_memory_gib
        return cost if peak is None else replace(cost, peak_memory_gib=max(peak, self.peak_memory_gib))

    def _description(self, inputs: Mapping[str, Any]) -> Description:
        return Description(what="solved values", model=self.identity.to_dict(), code=self._code, inputs=inputs)

    @functools.cached_property
    def _code(self) -> str:
        return code_fingerprint(value_optimization.__name__)
