"""SQLite cache of the unedited model's answers, shared by all runs on one model.

Comparisons with the unedited model need these answers, and no edit changes them. A key covers everything that can alter
an answer: identity of the model, code, engine, device, and the question with its decoding settings.
Several processes may share one file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edit_hooks.answers import ModelAnswer, answer_from_json, answer_to_json
from edit_hooks.store.layout import ANSWERS, ANSWERS_TABLE, mark
from edit_hooks.utils.hashing import key_of
from edit_hooks.utils.sqlite_cache import CacheTable, SQLiteCache

TABLE = CacheTable(name=ANSWERS_TABLE, columns="key TEXT PRIMARY KEY, answer TEXT, checksum TEXT", value="answer")

ItemT = TypeVar("ItemT", bound=Hashable)  # a dataclass: token ids and decoding settings


class AnswerCache:
    """Answers of one unedited model.

    Args:
        root: folder of the store.
        identity: everything that an answer depends on besides the question (JSON-able).
    """

    def __init__(self, root: Path, identity: Mapping[str, Any]) -> None:
        self.root = root
        self._cache = SQLiteCache(root / ANSWERS, TABLE)
        self.identity = dict(identity)

    def get(
        self, items: Iterable[ItemT], compute: Callable[[Sequence[ItemT]], Sequence[ModelAnswer]]
    ) -> dict[ItemT, ModelAnswer]:
        """Return the answers by item; ``compute`` answers items that are not stored."""
        distinct = list(dict.fromkeys(items))
        if not distinct:
            return {}
        keys = {item: self._key(item) for item in distinct}
        stored = self._cache.read(list(keys.values()))
        answers = {item: answer_from_json(json.loads(stored[key])) for item, key in keys.items() if key in stored}
        missing = [item for item in distinct if item not in answers]
        if missing:
            fresh = dict(zip(missing, compute(missing), strict=True))
            mark(self.root)
            self._cache.write({keys[item]: json.dumps(answer_to_json(answer)) for item, answer in fresh.items()})
            answers |= fresh
        return answers

    def _key(self, item: Any) -> str:
        return key_of({**self.identity, "kind": type(item).__name__, "item": dataclasses.asdict(item)})
