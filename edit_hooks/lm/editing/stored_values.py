"""Solved values of locate-then-edit editors in the store of a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from edit_hooks.edit_report import Cost
from edit_hooks.lm.editing.cost import KeptParts
from edit_hooks.locate.values import value_optimization
from edit_hooks.locate.values.kept_values import values_kept_in
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.storage.hashing import code_fingerprint

KIND = "values"  # of entries of the store


@dataclass
class StoredValues(KeptParts):
    """Values of a model in a store."""

    store: Store
    identity: ModelIdentity

    @classmethod
    def of(cls, store: Store | None, identity: ModelIdentity) -> StoredValues | None:
        """``None`` without a store."""
        return cls(store, identity) if store else None

    def scope(self) -> AbstractContextManager[None]:
        return values_kept_in(self)

    def load(self, inputs: Mapping[str, Any]) -> Any | None:
        found = self.store.load_json(KIND, self._description(inputs))
        if found is None:
            return None
        self.found(Cost(seconds=found["seconds"], peak_memory_gib=found["peak_memory_gib"]))
        return found["values"]

    def save(self, inputs: Mapping[str, Any], content: Any, seconds: float) -> None:
        record = {"values": content, "seconds": seconds, "peak_memory_gib": self.memory().peak_memory_gib}
        self.store.save_json(KIND, self._description(inputs), record)

    def _description(self, inputs: Mapping[str, Any]) -> Description:
        return Description(what="solved values", model=self.identity.to_dict(), code=self._code, inputs=inputs)

    @functools.cached_property
    def _code(self) -> str:
        return code_fingerprint(value_optimization.__name__)
