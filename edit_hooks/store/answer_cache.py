"""SQLite cache of a model's answers, shared by all runs on one model.

A key covers everything that can alter an answer: identity of the model, code, engine, device, the edit, and the
question with its decoding settings. Several processes may share one file.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edit_hooks.answers import ModelAnswer, answer_from_json, answer_to_json
from edit_hooks.store.layout import ANSWERS, ANSWERS_TABLE, mark
from edit_hooks.utils.progress import Finished
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.sqlite_cache import CacheTable, SQLiteCache

TABLE = CacheTable(name=ANSWERS_TABLE, columns="key TEXT PRIMARY KEY, answer TEXT, checksum TEXT", value="answer")

SECONDS_BETWEEN_WRITES = 20.0  # how much of a run's answers a kill may cost


class AnswerCache:
    """Answers of one model, unedited or under edits.

    Args:
        root: folder of the store.
        identity: everything that an answer depends on besides the question and its edit (JSON-able).
    """

    def __init__(self, root: Path, identity: Mapping[str, Any]) -> None:
        self.root = root
        self._cache = SQLiteCache(root / ANSWERS, TABLE)
        self.identity = dict(identity)

    def under(self, identity: Mapping[str, Any]) -> AnswerCache:
        """The answers of another model in the same file; what is known about the file's state is shared."""
        other = copy.copy(self)
        other.identity = dict(identity)
        return other

    def get(
        self,
        items: Sequence[Any],
        edits: Sequence[Mapping[str, Any]],
        compute: Callable[[Sequence[int], Finished], object],
    ) -> list[ModelAnswer]:
        """Return the answers in the order of the items.

        Answers are stored as they are computed: an interrupted run loses those of the last seconds.

        Args:
            items: dataclasses of token ids and decoding settings.
            edits: what an answer depends on in the edit of each item (JSON-able); empty without an edit.
            compute: gets the positions of items without a stored answer, and a function that takes the answers of
                some of these, with their places among them.
        """
        keys = [self._key(item, edit) for item, edit in zip(items, edits, strict=True)]
        distinct = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))  # key -> its first position
        stored = self._cache.read(list(distinct))
        answers = {key: answer_from_json(json.loads(text)) for key, text in stored.items()}
        missing = sorted((position, key) for key, position in distinct.items() if key not in answers)
        if missing:
            answers |= self._compute([position for position, _ in missing], [key for _, key in missing], compute)
        return [answers[key] for key in keys]

    def _compute(
        self, positions: Sequence[int], keys: Sequence[str], compute: Callable[[Sequence[int], Finished], object]
    ) -> dict[str, ModelAnswer]:
        """Compute answers and store them, also those of a computation that is interrupted."""
        answers: dict[str, ModelAnswer] = {}
        unsaved: list[str] = []
        written = time.monotonic()

        def write() -> None:
            nonlocal written
            if unsaved:
                mark(self.root)
                self._cache.write({key: json.dumps(answer_to_json(answers[key])) for key in unsaved})
                unsaved.clear()
            written = time.monotonic()

        def finished(places: Sequence[int], results: Sequence[ModelAnswer]) -> None:
            fresh = {keys[place]: answer for place, answer in zip(places, results, strict=True)}
            answers.update(fresh)
            unsaved.extend(fresh)
            if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                write()

        try:
            compute(positions, finished)
        finally:
            write()
        return answers

    def _key(self, item: Any, edit: Mapping[str, Any]) -> str:
        return key_of({**self.identity, "kind": type(item).__name__, "item": dataclasses.asdict(item), **edit})
