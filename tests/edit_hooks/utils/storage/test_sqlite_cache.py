"""The SQLite cache: several processes, damaged rows, damaged files, and files that only look damaged."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from edit_hooks.utils.storage import sqlite_cache
from edit_hooks.utils.storage.sqlite_cache import CacheTable, SQLiteCache

TABLE = CacheTable(name="things", columns="key TEXT PRIMARY KEY, note TEXT, thing TEXT, checksum TEXT", value="thing")
Connect = Callable[..., sqlite3.Connection]


@pytest.fixture
def cache(tmp_path: Path) -> SQLiteCache:
    return SQLiteCache(tmp_path / "folder" / "cache.sqlite", TABLE)


def execute(path: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def test_values_are_found_by_key_and_replaced(cache: SQLiteCache) -> None:
    assert cache.read(["a"]) == {} and not cache.path.exists()
    cache.write({"a": "1", "b": "ü"}, {"note": "first"})
    cache.write({"a": "2"})
    assert cache.read(["b", "a", "missing"]) == {"a": "2", "b": "ü"}
    assert execute(cache.path, "SELECT key, note, thing FROM things ORDER BY key") == [
        ("a", None, "2"),
        ("b", "first", "ü"),
    ]


def test_more_keys_than_one_query_takes(cache: SQLiteCache) -> None:
    values = {str(number): f"value {number}" for number in range(2 * sqlite_cache.KEYS_PER_QUERY + 1)}
    cache.write(values)
    assert cache.read([*values, "missing"]) == values


@pytest.mark.parametrize(
    "change", ["thing = 'forged'", "thing = NULL", "thing = x'00ff'", "thing = CAST(x'ff' AS TEXT)", "checksum = NULL"]
)
def test_a_row_with_a_wrong_checksum_counts_as_missing(cache: SQLiteCache, change: str) -> None:
    cache.write({"a": "1", "b": "2"})
    execute(cache.path, f"UPDATE things SET {change} WHERE key = 'a'")
    assert cache.read(["a", "b"]) == {"b": "2"}


def test_the_checksum_covers_the_key(cache: SQLiteCache) -> None:
    cache.write({"a": "1"})
    execute(cache.path, "UPDATE things SET key = 'b'")
    assert cache.read(["a", "b"]) == {}


# ------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("first_operation", ["read", "write"])
def test_a_file_that_is_no_database_is_renamed(
    cache: SQLiteCache, first_operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path.parent.mkdir()
    for number in (1, 2):
        content = f"not a database {number}".encode() * 100
        cache.path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert cache.read(["a"]) == {} if first_operation == "read" else cache.write({"a": "1"}) is None
        assert cache.path.with_name(f"cache.sqlite.damaged-{number}").read_bytes() == content
        assert f"cache.sqlite.damaged-{number}" in caplog.records[-1].message
    cache.write({"a": "1"})
    assert cache.read(["a"]) == {"a": "1"}


def test_damage_behind_the_header_is_noticed(cache: SQLiteCache) -> None:
    cache.write({str(number): "x" * 100 for number in range(200)})
    content = bytearray(cache.path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)  # the header and the schema stay readable
    cache.path.write_bytes(content)
    assert cache.read(["1"]) == {}
    assert cache.path.with_name("cache.sqlite.damaged-1").read_bytes() == bytes(content)
    cache.write({"1": "new"})
    assert cache.read(["1"]) == {"1": "new"}


def test_a_file_that_another_process_has_replaced_stays(cache: SQLiteCache) -> None:
    """Two processes meet the damage; the second one reaches the rename after the first has replaced the file."""
    cache.write({"a": "1"})
    cache._rename_damaged_file(sqlite3.DatabaseError("file is not a database"))
    assert cache.read(["a"]) == {"a": "1"}
    assert not list(cache.path.parent.glob("*.damaged-*"))


# ------------------------------------------------------------------ files that are not damaged


def read_only(connect: Connect) -> Connect:
    return lambda path, **options: connect(f"file:{path}?mode=ro", **{**options, "uri": True})


def on_a_full_disk(connect: Connect) -> Connect:
    def connect_with_bound(path: Path, **options: Any) -> sqlite3.Connection:
        connection = connect(path, **options)
        connection.execute("PRAGMA max_page_count = 3")
        return connection

    return connect_with_bound


@pytest.mark.parametrize(
    ("restrict", "message"), [(read_only, "readonly"), (on_a_full_disk, "disk is full")], ids=["read-only", "full"]
)
def test_a_file_that_cannot_be_written_stays_and_the_values_are_kept_in_memory(
    cache: SQLiteCache,
    restrict: Callable[[Connect], Connect],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.write({"a": "1"})
    content = cache.path.read_bytes()
    monkeypatch.setattr(sqlite3, "connect", restrict(sqlite3.connect))
    cache.write({"b": "2" * 10_000})
    cache.write({"c": "3"})
    assert cache.read(["a", "b", "c", "d"]) == {"a": "1", "b": "2" * 10_000, "c": "3"}
    assert len(caplog.records) == 1 and message in caplog.text and "The run continues" in caplog.text
    assert [path.name for path in cache.path.parent.iterdir()] == ["cache.sqlite"]
    assert cache.path.read_bytes() == content


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_locked_file_stays(
    cache: SQLiteCache, operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write({"a": "1"})
    monkeypatch.setattr(sqlite_cache, "LOCK_TIMEOUT_SECONDS", 0.05)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    assert cache.read(["a"]) == {} if operation == "read" else cache.write({"b": "2"}) is None
    assert len(caplog.records) == 1 and "locked" in caplog.text and "no other process" in caplog.text
    assert [path.name for path in cache.path.parent.iterdir() if path.suffix != ".sqlite-journal"] == ["cache.sqlite"]
    holder.communicate(timeout=60)
    assert SQLiteCache(cache.path, TABLE).read(["a"]) == {"a": "1"}


def test_a_table_with_other_columns_is_renamed(cache: SQLiteCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path.parent.mkdir()
    execute(cache.path, "CREATE TABLE things (name TEXT)")
    cache.write({"a": "1"})
    assert cache.read(["a"]) == {"a": "1"} and "no column" in caplog.text
    assert execute(cache.path.with_name("cache.sqlite.damaged-1"), "SELECT * FROM things") == []


def test_a_table_of_another_program_stays(cache: SQLiteCache) -> None:
    cache.path.parent.mkdir()
    execute(cache.path, "CREATE TABLE others AS SELECT 1")
    cache.write({"a": "1"})
    assert cache.read(["a"]) == {"a": "1"} and execute(cache.path, "SELECT * FROM others") == [(1,)]


@pytest.mark.parametrize("place", ["file/cache.sqlite", "\0"], ids=["below a file", "no name of a file"])
def test_a_folder_that_cannot_be_made_costs_a_warning(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = SQLiteCache(tmp_path / place, TABLE)
    cache.write({"a": "1"})
    assert cache.read(["a"]) == {"a": "1"} and "cannot use the cache" in caplog.text


def test_a_folder_in_the_place_of_the_file_is_renamed(cache: SQLiteCache) -> None:
    (cache.path / "inside").mkdir(parents=True)
    assert cache.read(["a"]) == {}
    cache.write({"a": "1"})
    assert SQLiteCache(cache.path, TABLE).read(["a"]) == {"a": "1"}
    assert cache.path.with_name("cache.sqlite.damaged-1").is_dir()


# ------------------------------------------------------------------ deletion


def test_a_file_that_is_removed_while_it_is_open_costs_nothing(
    cache: SQLiteCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process prunes between the connection and the first statement of a transaction."""
    cache.write({"a": "1"})
    connect, removed = sqlite3.connect, list[str]()

    def connect_and_remove(path: Path, **options: Any) -> sqlite3.Connection:
        connection = connect(path, **options)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not removed:
            removed.append(str(path))
            path.unlink()
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_and_remove)
    cache.write({"b": "2"})
    assert cache.read(["a", "b"]) == {"b": "2"} and removed and not caplog.records
    assert SQLiteCache(cache.path, TABLE).read(["a", "b"]) == {"b": "2"}


def test_a_database_in_use_is_not_removed(cache: SQLiteCache) -> None:
    cache.write({"a": "1"})
    holder = sqlite3.connect(cache.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="locked"):
        sqlite_cache.remove_database(cache.path)
    assert cache.path.exists()
    holder.close()
    sqlite_cache.remove_database(cache.path)
    assert not cache.path.exists()
    cache.path.write_bytes(b"no database" * 100)
    sqlite_cache.remove_database(cache.path)
    assert not cache.path.exists()


# ------------------------------------------------------------------ processes

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""

WRITER = """
import sys
from pathlib import Path
from edit_hooks.utils.storage.sqlite_cache import CacheTable, SQLiteCache

path, columns, name = sys.argv[1:]
cache = SQLiteCache(Path(path), CacheTable(name="things", columns=columns, value="thing"))
for number in range(50):
    cache.write({f"{name}-{number}": name})
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_several_processes_write_one_file_without_torch(cache: SQLiteCache) -> None:
    commands = [[sys.executable, "-c", WRITER, str(cache.path), TABLE.columns, name] for name in "abc"]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    expected = {f"{name}-{number}": name for name in "abc" for number in range(50)}
    assert cache.read(list(expected)) == expected
