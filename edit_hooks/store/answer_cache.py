"""Answers of the unedited model, kept in SQLite: asked once per model, reused by every later run.

They are needed for each comparison with the state before an edit and never change, so asking them again is a waste.
Keys hold everything that can alter an answer: weights, tokenizer, code, device, attention implementation, and the
question with its decoding settings. Several processes may use one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ModelAnswer, answer_from_json, answer_to_json
from edit_hooks.utils.hashing import key_of

log = logging.getLogger("lm_eval.edited_hf")


FILE = "answers.sqlite"


WAIT_SECONDS = 120.0  # for another process that writes


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
        self.path = root / FILE
        self.identity = dict(identity)

    def ask(
        self, items: Iterable[Any], ask: Callable[[Sequence[Any]], Sequence[ModelAnswer]]
    ) -> dict[Any, ModelAnswer]:
        """Answers by item: stored ones, and new ones from ``ask``, which are then stored."""
        distinct = list(dict.fromkeys(items))
        if not distinct:
            return {}
        keys = {item: self._key(item) for item in distinct}
        found = self._read(keys)
        missing = [item for item in distinct if item not in found]
        if missing:
            fresh = dict(zip(missing, ask(missing), strict=True))
            self._write({keys[item]: answer for item, answer in fresh.items()})
            found |= fresh
        return found

    def _key(self, item: Any) -> str:
        return key_of({**self.identity, "kind": type(item).__name__, "item": dataclasses.asdict(item)})

    def _read(self, keys: dict[Any, str]) -> dict[Any, ModelAnswer]:
        if not self.path.exists():
            return {}
        found: dict[Any, ModelAnswer] = {}
        with self._connection() as connection:
            for item, key in keys.items():
                row = connection.execute("SELECT answer, checksum FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None and hashlib.sha256(row[0].encode()).hexdigest() == row[1]:
                    found[item] = answer_from_json(json.loads(row[0]))
        return found

    def _write(self, answers: dict[str, ModelAnswer]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for key, answer in answers.items():
            text = json.dumps(answer_to_json(answer))
            rows.append((key, text, hashlib.sha256(text.encode()).hexdigest()))
        with self._connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A transaction; a file that is no database is put aside and begun anew."""
        try:
            connection = self._opened()
        except sqlite3.DatabaseError as error:
            log.warning("%s is damaged (%s); it is removed and filled again.", self.path, error)
            self.path.unlink(missing_ok=True)
            connection = self._opened()
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT_SECONDS)
        connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT, checksum TEXT)")
        return connection
