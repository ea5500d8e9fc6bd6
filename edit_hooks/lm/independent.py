"""Making the edits a run needs: once each, batched, kept in the store, with progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.resolve import resolve_with_store
from edit_hooks.request import RequestGroup
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import code_fingerprint, key_of

log = logging.getLogger("lm_eval.edited_hf")


# Edits made between two looks at the store: small enough to lose little, large enough to batch well.
BATCH, BATCH_ON_GPU = 16, 64


@dataclass(frozen=True)
class FailedEdit:
    """An edit that could not be made, and why; its questions stay unscored."""

    reason: str


class IndependentEdits:
    """Units of requests, each written on the untouched model: deltas made on demand, remembered and stored.

    A unit of several requests (a case with several edits, a group of cases) is written jointly where the editor can,
    else one request after another.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        editor: Editor,
        store: Store | None,
        quiet: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.editor, self.store, self.quiet = model, tokenizer, editor, store, quiet
        self.fingerprint, self.config = resolve_with_store(model, tokenizer, editor, store)
        self._deltas: dict[str, Delta | FailedEdit] = {}
        self._batch = BATCH_ON_GPU if next(model.parameters()).is_cuda else BATCH

    def get(self, units: Iterable[RequestGroup]) -> dict[str, Delta | FailedEdit]:
        """Deltas (or failures) of the units by unit key, computing only what is neither known nor stored."""
        distinct = {group_key(unit): unit for unit in units}
        new = [unit for key, unit in distinct.items() if key not in self._deltas]
        missing = [unit for unit in new if not self._load(unit)]
        if missing:
            self._make(new, sum(map(len, missing)))
        return {key: self._deltas[key] for key in distinct}

    def _description(self, unit: RequestGroup) -> dict[str, Any]:
        return {
            "what": "independent edit",
            "model": self.fingerprint,
            "editor": self.editor.name,
            "config": self.config,
            "requests": [request.key for request in unit],
            "code": code_fingerprint(),
        }

    def _load(self, unit: RequestGroup) -> bool:
        delta = self.store.load_delta(self._description(unit)) if self.store else None
        if delta is not None:
            self._deltas[group_key(unit)] = delta
        return delta is not None

    def _make(self, units: list[RequestGroup], num_missing: int) -> None:
        """Make those of the units that the store does not have."""
        label = f"Editing with {self.editor.name}"
        lone: list[RequestGroup] = [unit for unit in units if len(unit) == 1]
        with tqdm(total=num_missing, desc=label, unit="edit", disable=self.quiet) as bar:
            for start in range(0, len(lone), self._batch):
                self._make_chunk(lone[start : start + self._batch], bar)
            for unit in units:
                if len(unit) > 1 and group_key(unit) not in self._deltas:
                    began = time.perf_counter()
                    self._keep(unit, self._together(unit), time.perf_counter() - began)
                    bar.update(len(unit))

    def _make_chunk(self, chunk: list[RequestGroup], bar: tqdm[Any]) -> None:
        """The missing ones of a chunk in one batch.

        The last bits of float32 sums depend on who shares a batch. A batch whose saving was cut short by a kill is
        therefore computed again as it was, and only what is missing is saved: a resumed run repeats bit for bit.
        """
        while missing := [unit for unit in chunk if group_key(unit) not in self._deltas]:
            batch = self._cut_short(chunk, missing) or missing
            bar.total += len(batch) - len(missing)
            began = time.perf_counter()
            requests = [unit[0] for unit in batch]
            deltas = self.editor.edit(self.model, self.tokenizer, requests, progress=bar.update)
            keys = [group_key(unit) for unit in batch]
            for key, unit, delta in zip(keys, batch, deltas, strict=True):
                if key not in self._deltas:
                    delta.meta["batch"] = keys
                    self._keep(unit, delta, (time.perf_counter() - began) / len(batch))

    def _cut_short(self, chunk: list[RequestGroup], missing: list[RequestGroup]) -> list[RequestGroup] | None:
        """The batch of which a part is stored and a missing unit is the rest, if there is one."""
        by_key = {group_key(unit): unit for unit in chunk}
        for key in by_key:
            delta = self._deltas.get(key)
            batch = delta.meta.get("batch", []) if isinstance(delta, Delta) else []
            if by_key.keys() >= set(batch) and any(group_key(unit) in batch for unit in missing):
                return [by_key[key] for key in batch]
        return None

    def _together(self, unit: RequestGroup) -> Delta:
        """One delta for several requests: written jointly, or one after another where the editor cannot."""
        if self.editor.supports_joint:
            (delta,) = self.editor.edit(self.model, self.tokenizer, list(unit), joint=True)
            return delta
        steps: list[Delta] = []
        with AppliedDeltas(self.model) as applied:
            for request in unit:
                steps += self.editor.edit(self.model, self.tokenizer, [request], history=steps)
                applied.add(steps[-1])
        return Delta.summed(steps)

    def _keep(self, unit: RequestGroup, delta: Delta, seconds: float) -> None:
        delta.diagnostics["seconds"] = round(seconds, 4)
        try:
            delta.check_finite()
        except EditingError as error:
            log.warning("case %s: %s", unit[0].case_id, error)
            self._deltas[group_key(unit)] = FailedEdit(str(error))
            return
        self._deltas[group_key(unit)] = delta
        if self.store:
            self.store.save_delta(self._description(unit), delta)

    def report(self, key: str) -> dict[str, Any]:
        """What a sample's record says about its edit."""
        delta = self._deltas[key]
        if isinstance(delta, FailedEdit):
            return {"key": key, "editor": self.editor.name, "error": delta.reason}
        diagnostics = {name: value for name, value in delta.diagnostics.items() if name != "losses"}
        return {"key": key, "editor": self.editor.name, **diagnostics}


def group_key(unit: RequestGroup) -> str:
    """Identity of requests written together; that of a lone request is its own."""
    return unit[0].key if len(unit) == 1 else key_of([request.key for request in unit])
