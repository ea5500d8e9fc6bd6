"""SQLite cache of the unedited model's answers, shared by all runs on one model.

Comparisons with the unedited model need these answers, and no edit changes them. A key covers everything that can alter
an answer: weights, tokenizer, code, device, attention implementation, and the question with its decoding settings.
Several processes may share one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ModelAnswer, answer_from_json, answer_to_json
from edit_hooks.store.layout import ANSWERS, ANSWERS_TABLE, mark
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of
from edit_hooks.utils.sqlite_cache import CacheTable, SQLiteCache

TABLE = CacheTable(name=ANSWERS_TABLE, columns="key TEXT PRIMARY KEY, answer TEXT, checksum TEXT", value="answer")

ItemT = TypeVar("ItemT", bound=Hashable)  # a dataclass: token ids and decoding settings


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of a tokenizer's rules.

    Raises:
        EditingError: for slow tokenizers, which have no serialized form.
    """
    if not tokenizer.is_fast:
        raise EditingError(
            f"answers of models with {type(tokenizer).__name__} cannot be stored; use the fast tokenizer of this model "
            "(use_fast_tokenizer=True) or store=off."
        )
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


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
