"""Answers of the unedited model, kept in SQLite: asked once per model, reused by every later run.

They are needed for each comparison with the state before an edit and never change, so asking them again is a waste.
Keys hold everything that can alter an answer: weights, tokenizer, code, device, attention implementation, and the
question with its decoding settings. Several processes may use one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from edit_hooks.utils.hashing import code_fingerprint, key_of
from edit_hooks.utils.sqlite_cache import CacheTable, SQLiteCache

Answer = dict[str, Any]


FILE = "answers.sqlite"


TABLE = CacheTable(name="answers", columns="key TEXT PRIMARY KEY, answer TEXT, checksum TEXT", value="answer")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of what a fast tokenizer does."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


class AnswerStore:
    """Answers of one unedited model.

    Args:
        root: folder of the store.
        identity: everything but the question that an answer depends on.
    """

    def __init__(self, root: Path, identity: dict[str, Any]) -> None:
        self._cache = SQLiteCache(root / FILE, TABLE)
        self.identity = {**identity, "code": code_fingerprint()}

    def ask(
        self, items: Iterable[Any], ask: Callable[[Sequence[Any]], list[dict[str, Any]]]
    ) -> dict[Any, dict[str, Any]]:
        """Answers by item: stored ones, and new ones from ``ask``, which are then stored."""
        distinct = list(dict.fromkeys(items))
        if not distinct:
            return {}
        keys = {item: self._key(item) for item in distinct}
        stored = self._cache.read(list(keys.values()))
        answers = {item: json.loads(stored[key]) for item, key in keys.items() if key in stored}
        missing = [item for item in distinct if item not in answers]
        if missing:
            fresh = dict(zip(missing, ask(missing), strict=True))
            self._cache.write({keys[item]: json.dumps(answer) for item, answer in fresh.items()})
            answers |= fresh
        return answers

    def _key(self, item: Any) -> str:
        return key_of({**self.identity, "kind": type(item).__name__, "item": dataclasses.asdict(item)})
