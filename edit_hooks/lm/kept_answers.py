"""Answers under edits in the store: a run that was stopped, or whose judge failed, does not ask for them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edit_hooks.deltas.apply import UNEDITED_STATE
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import kind_class
from edit_hooks.store.answer_cache import AnswerCache
from edit_hooks.store.store import Store
from edit_hooks.utils.hashing import code_fingerprint
from edit_hooks.utils.progress import Finished


class KeptAnswers:
    """Answers of one model at one state of its weights.

    Args:
        identity: what every answer depends on: model, engine and its code, device (JSON-able).
        weights: fingerprint of the edits in the weights (:meth:`~edit_hooks.deltas.apply.AppliedDeltas.state`).
        application: how edits outside the weights are applied; it moves last digits.
    """

    def __init__(self, store: Store, identity: Mapping[str, Any], weights: str, application: str) -> None:
        state = {} if weights == UNEDITED_STATE else {"weights": weights}
        self._cache = AnswerCache(store.root, {**identity, **state})
        self._application = application

    def get(
        self,
        jobs: Sequence[tuple[Any, Delta | None]],
        compute: Callable[[Sequence[tuple[Any, Delta | None]], Finished], object],
    ) -> list[Any]:
        """Return the answers in the order of the jobs; ``compute`` answers those that are not stored."""
        parts: dict[Delta | None, dict[str, Any]] = {None: {}}
        for _, delta in jobs:
            if delta is not None and delta not in parts:
                parts[delta] = self._part(delta)
        return self._cache.get(
            [item for item, _ in jobs],
            [parts[delta] for _, delta in jobs],
            lambda missing, finished: compute([jobs[position] for position in missing], finished),
        )

    def _part(self, delta: Delta) -> dict[str, Any]:
        """What the answers of a job depend on in its edit: content, and the code of its hooks."""
        part = {"edit": delta.digest(), "application": self._application}
        if delta.hook_edit is not None:
            part["hooks"] = code_fingerprint(kind_class(delta.hook_edit.kind).__module__)
        return part
