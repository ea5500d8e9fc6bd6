"""Answers under edits in the store: a run that was stopped, or whose judge failed, does not ask for them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.apply import UNEDITED_STATE
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HOOK_KINDS, kind_class
from edit_hooks.inference import decoding, reference, scoring, written
from edit_hooks.inference.effects import states
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.store.answer_cache import AnswerCache
from edit_hooks.store.store import Store
from edit_hooks.utils.progress import Finished, ignore_finished
from edit_hooks.utils.storage.hashing import code_fingerprint, has_source, key_of

# Modules that decide how a model answers.
ANSWERING_MODULES = tuple(module.__name__ for module in (scoring, decoding, reference, states, written))


class KeptAnswers:
    """Answers of one model at one state of its weights.

    Args:
        cache: the answers of the run's store.
        identity: what every answer depends on: model, engine and its code, device (JSON-able).
        weights: fingerprint of the edits in the weights (:meth:`~edit_hooks.deltas.apply.AppliedDeltas.state`).
        application: how edits outside the weights are applied; it moves last digits.
    """

    def __init__(self, cache: AnswerCache, identity: Mapping[str, Any], weights: str, application: str) -> None:
        self._cache = cache.under({**identity, **({} if weights == UNEDITED_STATE else {"weights": weights})})
        self._application = application

    def get(
        self,
        jobs: Sequence[tuple[Any, Delta | None]],
        compute: Callable[[Sequence[tuple[Any, Delta | None]], Finished], list[Any]],
    ) -> list[Any]:
        """Return the answers in the order of the jobs; ``compute`` answers those that are not stored.

        Answers under hooks whose code cannot be read (a compiled module) are neither read nor kept.
        """
        if any(delta is not None and not _has_source(delta) for _, delta in jobs):
            return compute(jobs, ignore_finished)
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
        part = {"edit": delta.checksum(), "application": self._application}
        if delta.hook_edit is not None:
            part["hooks"] = code_fingerprint(kind_class(delta.hook_edit.kind).__module__)
        return part


class AnswerStore:
    """The answers in a run's store, at all states of its weights.

    Args:
        store: ``None``: no answer is kept.
        engine, application: how answers are computed, and how edits outside the weights are applied.
    """

    def __init__(self, store: Store | None, engine: str, application: str) -> None:
        # One object per run: it remembers that the file is locked or read-only.
        self._cache = None if store is None else AnswerCache(store.root, {})
        self._engine, self._application = engine, application

    def of_model(
        self, identity: ModelIdentity, parts: Mapping[str, Any], device: torch.device
    ) -> Callable[[str], KeptAnswers | None]:
        """The answers of a model by the state of its weights; ``None`` where they are not kept.

        Args:
            parts: all that an answer of the model depends on.
        """
        cache = self._cache
        if cache is None or identity.hooks:  # with foreign hooks nothing would ever be found again
            return lambda weights: None
        about = {
            "model": key_of(parts),
            "engine": self._engine,
            "device": device.type,
            "code": code_fingerprint(*ANSWERING_MODULES),
        }
        return lambda weights: KeptAnswers(cache, about, weights, self._application)


def _has_source(delta: Delta) -> bool:
    return delta.hook_edit is None or has_source(kind_class(delta.hook_edit.kind).__module__)


def read_code(editor: Editor[Any] | None) -> None:
    """Fingerprint the code behind answers now, which may be changed on disk while a run works with what it imported.

    Args:
        editor: whose kinds of hooks count besides the built-in ones; ``None`` for a saved edit.
    """
    code_fingerprint(*ANSWERING_MODULES)
    own = () if editor is None else tuple(kind.__module__ for kind in editor.hook_kinds.values())
    for module in {*(path.partition(":")[0] for path in HOOK_KINDS.values()), *own}:
        if has_source(module):
            code_fingerprint(module)
