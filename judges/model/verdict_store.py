"""The verdict store: all replies of judge models, by judge, prompt, question, gold answer and answer.

Replies are stored verbatim and parsed on each read, so a better parser needs no new requests. Each reply is written as
soon as it arrives: a killed run loses only the requests in flight. Faults are not stored.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from edit_hooks.utils.storage.sqlite_cache import CacheTable, Column, SQLiteCache
from judges.backends.base import Reply
from judges.base import Item

FILE = "verdicts.sqlite"

TABLE = CacheTable(
    name="replies",
    columns="key TEXT PRIMARY KEY, judge TEXT, prompt_hash TEXT, question TEXT, gold TEXT, answer TEXT, reply TEXT, "
    "checksum TEXT, stored_at REAL",
    value="reply",
)


class VerdictStore:
    """Replies of one judge with one prompt.

    Args:
        folder: folder of the file, created at the first write. ``None`` keeps the replies in memory.
        judge: all settings that a reply depends on (JSON-able).
        prompt_hash: SHA-256 (hex) of the prompt.
    """

    def __init__(self, folder: Path | None, judge: Mapping[str, object], prompt_hash: str) -> None:
        self.path = None if folder is None else folder / FILE
        self.judge = json.dumps(judge, sort_keys=True, ensure_ascii=False)
        self.prompt_hash = prompt_hash
        self._cache = SQLiteCache(self.path, TABLE)
        self._lock = threading.Lock()

    @property
    def is_kept(self) -> bool:
        """Whether replies are stored for later runs: there is a folder, and no write has failed."""
        return self._cache.is_kept

    def key(self, item: Item) -> str:
        """SHA-256 (hex) over judge, prompt hash, question, gold answer and answer."""
        parts = [self.judge, self.prompt_hash, item.question, item.gold, item.answer]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, items: Iterable[Item]) -> dict[Item, Reply]:
        """Return the stored replies by item."""
        keys = {item: self.key(item) for item in items}
        stored = self._cache.read(list(keys.values()))
        return {item: Reply(**json.loads(stored[key])) for item, key in keys.items() if key in stored}

    def write(self, item: Item, reply: Reply) -> None:
        """Store a reply; safe to call from several threads."""
        key, text = self.key(item), json.dumps(reply._asdict())
        details: dict[str, Column] = {
            "judge": self.judge,
            "prompt_hash": self.prompt_hash,
            "question": item.question,
            "gold": item.gold,
            "answer": item.answer,
            "stored_at": time.time(),
        }
        with self._lock:  # the threads of a process would otherwise wait for the file in SQLite's busy loop
            self._cache.write({key: text}, details)
