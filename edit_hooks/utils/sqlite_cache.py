"""Key/value cache in an SQLite file that several processes share."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)

LOCK_TIMEOUT_SECONDS = 120.0  # how long to wait for a process that holds the database
KEYS_PER_QUERY = 500  # SQLite bounds the number of parameters in a statement

Result = TypeVar("Result")
Column = str | float | None


@dataclass(frozen=True, kw_only=True)
class CacheTable:
    """Layout of a cache's only table.

    It is a file format: existing files must stay readable.

    Args:
        name: table name.
        columns: column definitions in SQL, among them ``key`` (primary key) and ``checksum``.
        value: name of the column that holds the value.
        checksum_covers_key: whether the checksum is taken over key and value, or over the value alone.
    """

    name: str
    columns: str
    value: str
    checksum_covers_key: bool = False

    def checksum(self, key: str, value: str) -> str:
        """SHA-256 (hex) stored beside a value."""
        text = f"{key}{value}" if self.checksum_covers_key else value
        return hashlib.sha256(text.encode()).hexdigest()


class SQLiteCache:
    """Text values by text keys, each with a checksum.

    Each call opens its own connection, so one object may be used from several threads, and one file from several
    processes. Rows with a wrong checksum count as missing. A damaged file is renamed to ``<name>.damaged-<n>`` with a
    logged warning, and an empty one takes its place; a file that is locked, read-only or on a full disk is left alone.

    Args:
        path: the database file, created at the first write together with its folder.
        table: layout of the table.
    """

    def __init__(self, path: Path, table: CacheTable) -> None:
        self.path, self.table = path, table

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the stored values among ``keys``, by key.

        Raises:
            EditingError: if the file cannot be accessed.
        """
        if not self.path.exists():
            return {}
        return self._run(lambda: self._select(keys))

    def write(self, values: Mapping[str, str], details: Mapping[str, Column] | None = None) -> None:
        """Store values by key, replacing earlier ones, in one transaction.

        Args:
            values: key -> value.
            details: contents of further columns, the same for all rows.

        Raises:
            EditingError: if the file cannot be accessed.
        """
        self._run(lambda: self._insert(values, details or {}))

    def _select(self, keys: Sequence[str]) -> dict[str, str]:
        table = self.table
        values: dict[str, str] = {}
        with self._transaction() as connection:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                chunk = keys[start : start + KEYS_PER_QUERY]
                marks = ", ".join("?" * len(chunk))
                query = f"SELECT key, {table.value}, checksum FROM {table.name} WHERE key IN ({marks})"
                for key, value, checksum in connection.execute(query, chunk):
                    if isinstance(value, str) and table.checksum(key, value) == checksum:
                        values[key] = value
        return values

    def _insert(self, values: Mapping[str, str], details: Mapping[str, Column]) -> None:
        table = self.table
        names = ["key", table.value, "checksum", *details]
        rows = [(key, value, table.checksum(key, value), *details.values()) for key, value in values.items()]
        marks = ", ".join("?" * len(names))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._transaction() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO {table.name} ({', '.join(names)}) VALUES ({marks})", rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_SECONDS)) as connection, connection:
            # A text that is not UTF-8 gets a wrong checksum instead of an exception.
            connection.text_factory = lambda content: content.decode(errors="replace")
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self.table.name} ({self.table.columns})")
            yield connection

    def _run(self, operation: Callable[[], Result]) -> Result:
        """Run an operation, a second time if the first attempt met a damaged file."""
        try:
            try:
                return operation()
            except sqlite3.DatabaseError as error:
                if not _reports_damage(error):
                    raise
                self._rename_damaged_file(error)
                return operation()
        except (sqlite3.OperationalError, OSError) as error:
            raise EditingError(
                f"cannot use the cache {self.path}: {error}. The file must be writable, the disk must have free space, "
                "and no other process may hold the file; or choose another folder."
            ) from error

    def _rename_damaged_file(self, error: sqlite3.DatabaseError) -> None:
        from filelock import FileLock  # slow to import and rarely needed

        # Several processes may meet the damage at once. Only the first may rename: the next one checks again under the
        # lock and finds the new, intact file.
        with FileLock(f"{self.path}.lock"):
            if not self._is_damaged():
                return
            names = (self.path.with_name(f"{self.path.name}.damaged-{number}") for number in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            log.warning(
                "%s is damaged (%s); it is renamed to %s and a new file replaces it.", self.path, error, aside.name
            )
            self.path.replace(aside)

    def _is_damaged(self) -> bool:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_SECONDS)) as connection:
                return bool(connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",))
        except sqlite3.DatabaseError as error:
            if _reports_damage(error):
                return True
            raise


def _reports_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether SQLite found the file's content malformed.

    Not so for a locked or read-only file, or a full disk.

    The module raises plain ``DatabaseError`` for SQLITE_CORRUPT and SQLITE_NOTADB, and subclasses for everything else.
    """
    return type(error) is sqlite3.DatabaseError
