"""The verdict store: every reply a judge gave, found by judge, prompt, question, gold answer and answer.

Replies are kept as they came and read again each time, so a better parser costs nothing. Each is written the moment it
arrives: a killed run loses only what was in flight. Faults are never stored. Several processes may use one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from judges.backends.base import Reply
from judges.base import Item

log = logging.getLogger("lm_eval.judges")


FILE = "verdicts.sqlite"


WAIT_SECONDS = 120.0  # for another process that writes


_AT_ONCE = 500  # keys per query


class VerdictStore:
    """Replies of one judge under one prompt.

    Args:
        folder: where the file is; made at the first write. ``None`` keeps replies for the length of this object only.
        judge: all settings that a reply depends on (JSON-able).
        prompt_hash: SHA-256 (hex) of the prompt.
    """

    def __init__(self, folder: Path | None, judge: Mapping[str, Any], prompt_hash: str) -> None:
        self.path = None if folder is None else folder / FILE
        self.judge = json.dumps(judge, sort_keys=True, ensure_ascii=False)
        self.prompt_hash = prompt_hash
        self._memory: dict[str, Reply] = {}
        self._lock = threading.Lock()

    def key(self, item: Item) -> str:
        """SHA-256 (hex) of judge, prompt hash, question, gold answer and answer."""
        parts = [self.judge, self.prompt_hash, item.question, item.gold, item.answer]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, items: Iterable[Item]) -> dict[Item, Reply]:
        """The stored replies among these items; a row whose checksum is wrong counts as missing."""
        keys = {self.key(item): item for item in items}
        if self.path is None:
            return {item: self._memory[key] for key, item in keys.items() if key in self._memory}
        if not self.path.exists():
            return {}
        found: dict[Item, Reply] = {}
        listed = list(keys)
        with self._connection() as connection:
            for start in range(0, len(listed), _AT_ONCE):
                part = listed[start : start + _AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = connection.execute(f"SELECT key, reply, checksum FROM replies WHERE key IN ({marks})", part)
                for key, reply, checksum in rows:
                    if hashlib.sha256(f"{key}{reply}".encode()).hexdigest() == checksum:
                        found[keys[key]] = Reply(**json.loads(reply))
        return found

    def write(self, item: Item, reply: Reply) -> None:
        """Keep a reply; safe from several threads."""
        key = self.key(item)
        text = json.dumps(reply._asdict())
        row = (key, self.judge, self.prompt_hash, item.question, item.gold, item.answer, text)
        checksum = hashlib.sha256(f"{key}{text}".encode()).hexdigest()
        with self._lock:
            if self.path is None:
                self._memory[key] = reply
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connection() as connection:
                connection.execute(
                    "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, checksum, time.time())
                )

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A transaction. A file that is no database was paid for once: it is put aside, not removed."""
        assert self.path is not None
        try:
            connection = self._opened(self.path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # locked or not writable: not damaged
            aside = self.path.with_suffix(f".damaged-{int(time.time())}")
            log.warning("%s is damaged (%s); it is moved to %s and begun anew.", self.path, error, aside.name)
            self.path.replace(aside)
            connection = self._opened(self.path)
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    @staticmethod
    def _opened(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS)
        try:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, judge TEXT, prompt_hash TEXT, "
                "question TEXT, gold TEXT, answer TEXT, reply TEXT, checksum TEXT, stored_at REAL)"
            )
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection
