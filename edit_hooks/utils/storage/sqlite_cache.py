"""Key/value cache in an SQLite file that several processes share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import set_aside

log = get_logger(__name__)

LOCK_TIMEOUT_SECONDS = 120.0  # how long to wait for a process that holds the database
KEYS_PER_QUERY = 500  # SQLite bounds the number of parameters in a statement

Result = TypeVar("Result")
Column = str | float | None

# Messages of SQLite about the file's surroundings; any other error is about its content. Error codes need Python 3.11.
_SURROUNDINGS = ("locked", "readonly", "disk I/O error", "disk is full", "unable to open", "locking protocol", "denied")
# A damaged file can raise far more than DatabaseError, such as DataError and OverflowError for a value's length.
_FAILURES = (sqlite3.Error, OSError, ValueError, OverflowError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class CacheTable:
    """Layout of a cache's only table.

    It is a file format: existing files must stay readable.

    Args:
        name: table name.
        columns: column definitions in SQL, among them ``key`` (primary key) and ``checksum``.
        value: name of the column that holds the value.
    """

    name: str
    columns: str
    value: str

    @property
    def column_names(self) -> list[str]:
        """Names of all columns."""
        return [definition.split()[0] for definition in self.columns.split(",")]

    @staticmethod
    def checksum(key: str, value: str) -> str:
        """SHA-256 (hex) stored beside a value; over the key too, because damage of the index swaps rows."""
        return hashlib.sha256(f"{key}{value}".encode()).hexdigest()


class SQLiteCache:
    """Text values by text keys, each with a checksum.

    Each call opens its own connection, so one object may be used from several threads, and one file from several
    processes. Rows with a wrong checksum count as missing. A damaged file is renamed to ``<name>.damaged-<n>`` with a
    logged warning, and an empty one takes its place. A file that is locked, read-only or on a full disk is left alone:
    the cost is a warning, and values that cannot be stored are kept in memory.

    Args:
        path: the database file, created at the first write together with its folder. ``None`` keeps all values in
            memory.
        table: layout of the table.
    """

    def __init__(self, path: Path | None, table: CacheTable) -> None:
        self.path, self.table = path, table
        self._memory: dict[str, str] = {}
        self._is_readable = self._is_writable = path is not None

    @property
    def is_kept(self) -> bool:
        """Whether values outlive this object: there is a file, and no write has failed so far."""
        return self._is_writable

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the known values among ``keys``, by key."""
        values: dict[str, str] = {}
        if self._is_readable:
            try:
                values = self._run(lambda path: self._select(path, keys))
                if values and self.path is not None:
                    with contextlib.suppress(OSError):
                        os.utime(self.path)  # files that are used are pruned last
            except _FAILURES as error:
                self._is_readable = False
                self._warn(error)
        return values | {key: self._memory[key] for key in keys if key in self._memory}

    def write(self, values: Mapping[str, str], details: Mapping[str, Column] | None = None) -> None:
        """Store values by key, replacing earlier ones, in one transaction.

        Args:
            values: key -> value; texts with a UTF-8 form, as JSON in ASCII.
            details: contents of further columns, the same for all rows. They are for readers: half surrogate pairs,
                which SQLite cannot store, are escaped.
        """
        if self._is_writable:
            try:
                return self._run(lambda path: self._insert(path, values, details or {}))
            except _FAILURES as error:
                self._is_writable = False
                self._warn(error)
        self._memory |= values
        return None

    def _select(self, path: Path, keys: Sequence[str]) -> dict[str, str]:
        table = self.table
        values: dict[str, str] = {}
        if not path.exists():
            return values
        with self._transaction(path) as connection:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                chunk = keys[start : start + KEYS_PER_QUERY]
                marks = ", ".join("?" * len(chunk))
                query = f"SELECT key, {table.value}, checksum FROM {table.name} WHERE key IN ({marks})"
                for key, value, checksum in connection.execute(query, chunk):
                    if isinstance(value, str) and table.checksum(key, value) == checksum:
                        values[key] = value
        return values

    def _insert(self, path: Path, values: Mapping[str, str], details: Mapping[str, Column]) -> None:
        table = self.table
        names = ["key", table.value, "checksum", *details]
        readable = [_storable(detail) for detail in details.values()]
        rows = [(key, value, table.checksum(key, value), *readable) for key, value in values.items()]
        marks = ", ".join("?" * len(names))
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._transaction(path) as connection:
            connection.executemany(f"INSERT OR REPLACE INTO {table.name} ({', '.join(names)}) VALUES ({marks})", rows)

    @contextlib.contextmanager
    def _transaction(self, path: Path) -> Iterator[sqlite3.Connection]:
        with _connected(path) as connection, connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self.table.name} ({self.table.columns})")
            yield connection

    def _run(self, operation: Callable[[Path], Result]) -> Result:
        """Run an operation, a second time if the first attempt met a damaged file or one that was just removed."""
        assert self.path is not None
        try:
            return operation(self.path)
        except _FAILURES as error:
            if not _is_about_surroundings(error) or self.path.is_dir() or _has_damaged_header(self.path):
                self._rename_damaged_file(error)
            elif "readonly" not in str(error):  # SQLite's word also for a file that was removed while it was open
                raise
            return operation(self.path)

    def _rename_damaged_file(self, error: BaseException) -> None:
        from filelock import FileLock  # slow to import and rarely needed

        assert self.path is not None
        # Several processes may meet the damage at once. Only the first may rename: the next one checks again under the
        # lock and finds the new, intact file.
        with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_SECONDS):
            if self._is_damaged(self.path):
                aside = set_aside(self.path)
                log.warning(
                    "%s is damaged (%s); it is renamed to %s and a new file replaces it.", self.path, error, aside
                )

    def _is_damaged(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            with _connected(path) as connection:
                names = ", ".join(self.table.column_names)
                connection.execute(f"CREATE TABLE IF NOT EXISTS {self.table.name} ({self.table.columns})")
                connection.execute(f"SELECT {names} FROM {self.table.name} LIMIT 1").fetchone()
                return bool(connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",))
        except _FAILURES as error:
            if not _is_about_surroundings(error) or path.is_dir() or _has_damaged_header(path):
                return True
            raise

    def _warn(self, error: BaseException) -> None:
        assert self.path is not None
        _warn_unusable(self.path, str(error))


def _storable(detail: Column) -> Column:
    """The content of a column, with half surrogate pairs as escapes of Python."""
    return detail.encode(errors="backslashreplace").decode() if isinstance(detail, str) else detail


def tables_in(path: Path) -> set[str] | None:
    """Names of the tables of an SQLite file, which is not changed; ``None`` if it cannot be read as one."""
    try:
        with _connected(path, "?mode=ro", timeout=1.0) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return {str(name) for (name,) in rows}
    except _FAILURES:
        return None


def remove_database(path: Path) -> None:
    """Delete an SQLite file, between the transactions of other processes.

    Their next transaction on the deleted file fails, and :class:`SQLiteCache` then runs it on a new file. Deleting in
    the middle of a transaction would leave its journal to be applied to that new file.

    Raises:
        OSError: if a process holds the file, or it cannot be deleted.
    """
    try:
        with _connected(path, "?mode=rw", timeout=1.0) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            path.unlink(missing_ok=True)
    except sqlite3.Error as error:
        if _is_about_surroundings(error) and path.exists():
            raise OSError(f"cannot remove {path}: {error}") from error
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _connected(path: Path, options: str = "", timeout: float | None = None) -> Iterator[sqlite3.Connection]:
    seconds = LOCK_TIMEOUT_SECONDS if timeout is None else timeout
    place = f"{path.absolute().as_uri()}{options}" if options else path
    with contextlib.closing(sqlite3.connect(place, timeout=seconds, uri=bool(options))) as connection:
        # A text that is not UTF-8 gets a wrong checksum instead of an exception.
        connection.text_factory = lambda content: content.decode(errors="replace")
        yield connection


def _is_about_surroundings(error: BaseException) -> bool:
    """Whether an error is about a lock, the disk or permissions, and not about the file's content."""
    if isinstance(error, sqlite3.OperationalError):
        return any(words in str(error) for words in _SURROUNDINGS)
    return isinstance(error, OSError)


def _has_damaged_header(path: Path) -> bool:
    """Whether the format versions in a file's header are invalid, for which SQLite's message is "readonly"."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        versions = file.read(20)[18:]
        return bool(set(versions) - {1, 2})
    return False


@functools.cache
def _warn_unusable(path: Path, reason: str) -> None:
    log.warning(
        "cannot use the cache %s: %s. The run continues without it and keeps new results in memory only. The file must "
        "be writable, the disk must have free space, and no other process may hold the file; or choose another folder.",
        path,
        reason,
    )
