"""The verdict store: keys, file format, damaged rows and files."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from judges.backends.base import Reply
from judges.base import Item
from judges.model.verdict_store import VerdictStore
from judges.prompt import load_prompt
from judges.settings import read_settings

ITEM = Item("question", "gold", "answer")


def test_judge_prompt_question_gold_and_answer_make_the_key(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path, {"model": "m"}, "prompt")
    store.write(ITEM, Reply("A"))
    assert store.read([ITEM]) == {ITEM: Reply("A")}
    others = [ITEM._replace(question="q2"), ITEM._replace(gold="g2"), ITEM._replace(answer="a2")]
    assert store.read([*others, Item("questiongold", "", "answer")]) == {}
    assert VerdictStore(tmp_path, {"model": "n"}, "prompt").read([ITEM]) == {}
    assert VerdictStore(tmp_path, {"model": "m"}, "another prompt").read([ITEM]) == {}


def test_without_a_folder_replies_stay_in_memory() -> None:
    store = VerdictStore(None, {}, "prompt")
    store.write(ITEM, Reply("A", "stop", 100, 1))
    assert store.path is None and store.read([ITEM, Item("q", "g", "a")]) == {ITEM: Reply("A", "stop", 100, 1)}


def test_half_a_surrogate_pair_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One such text must not disable the store: every request of the run would be paid again."""
    items = [ITEM._replace(answer=f"Pa\ud800ris {n}", question="\udfff?", gold="\ud800") for n in range(2)]
    store = VerdictStore(tmp_path, {"model": "m", "system": "\ud800"}, "prompt")
    for item in [*items, ITEM]:
        store.write(item, Reply("A \ud800"))
    again = VerdictStore(tmp_path, {"model": "m", "system": "\ud800"}, "prompt")
    assert again.read([*items, ITEM]) == dict.fromkeys([*items, ITEM], Reply("A \ud800")) and not caplog.records
    connection = sqlite3.connect(tmp_path / "verdicts.sqlite")
    answers = {answer for (answer,) in connection.execute("SELECT answer FROM replies")}
    connection.close()
    assert answers == {"Pa\\ud800ris 0", "Pa\\ud800ris 1", "answer"} and len(list(tmp_path.iterdir())) == 1


def test_a_store_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stores = [VerdictStore(place, {}, "prompt") for place in (tmp_path, tmp_path / "file" / "x", None)]
    for store in stores:
        store.write(ITEM, Reply("A"))
    assert [store.is_kept for store in stores] == [True, False, False]


def test_a_row_that_was_changed_counts_as_missing(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path, {}, "prompt")
    store.write(ITEM, Reply("B"))
    connection = sqlite3.connect(tmp_path / "verdicts.sqlite")
    with connection:
        connection.execute("UPDATE replies SET reply = replace(reply, 'B', 'A')")
    connection.close()
    assert store.read([ITEM]) == {}


def test_a_damaged_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "verdicts.sqlite").write_bytes(b"not a database" * 100)
    store = VerdictStore(tmp_path, {}, "prompt")
    store.write(ITEM, Reply("A"))
    assert store.read([ITEM]) == {ITEM: Reply("A")}
    assert (tmp_path / "verdicts.sqlite.damaged-1").read_bytes() == b"not a database" * 100


# ------------------------------------------------------------------ file format

# A file as the first version wrote it: the preset `published_setting`, then called `published`, on the shipped prompt.
COLUMNS = (
    "key TEXT PRIMARY KEY, judge TEXT, prompt_hash TEXT, question TEXT, gold TEXT, answer TEXT, reply TEXT, "
    "checksum TEXT, stored_at REAL"
)
ROW = (
    "200307150d42edbe46f168616bcacd381b0e64a7d5e3de7046d7c2ff40966771",
    '{"backend": "openai", "base_url": "https://api.openai.com/v1", "extra": {}, "max_reply_tokens": 16, '
    '"model": "gpt-4o-mini", "seed": null, "temperature": 0.0}',
    "096c54a1581a6592345a4a75566991e029afbf7a13c3927070c682ab4381353e",
    "What is 2 plus 2?",
    "4",
    "vier",
    '{"text": "A", "finish": "stop", "prompt_tokens": 100, "reply_tokens": 1}',
    "f7ddbf1bdfccaf2d73ba081486e2f0bb3ff7e7da6d001f6ece3fc524747e7a23",
    1795337604.14,
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerdictStore:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return VerdictStore(tmp_path, read_settings("published_setting").identity, load_prompt("correctness_v1").hash)


def test_a_file_of_an_earlier_version_is_read_and_extended(tmp_path: Path, store: VerdictStore) -> None:
    connection = sqlite3.connect(tmp_path / "verdicts.sqlite")
    with connection:
        connection.execute(f"CREATE TABLE replies ({COLUMNS})")
        connection.execute(f"INSERT INTO replies VALUES ({', '.join('?' * len(ROW))})", ROW)
    connection.close()
    item = Item("What is 2 plus 2?", "4", "vier")
    store.write(ITEM, Reply("B"))
    assert store.read([item, ITEM]) == {item: Reply("A", "stop", 100, 1), ITEM: Reply("B")}


def test_the_file_format_is_unchanged(tmp_path: Path, store: VerdictStore) -> None:
    store.write(Item("What is 2 plus 2?", "4", "vier"), Reply(**json.loads(ROW[6])))
    connection = sqlite3.connect(tmp_path / "verdicts.sqlite")
    (schema,) = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table'").fetchone()
    (row,) = connection.execute("SELECT * FROM replies").fetchall()
    connection.close()
    assert schema == f"CREATE TABLE replies ({COLUMNS})" and row[:-1] == ROW[:-1]
