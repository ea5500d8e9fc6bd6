"""Answers of the unedited model on disk: the file format, and the identity of a stored answer."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.answers import GeneratedText
from edit_hooks.store.answer_cache import AnswerCache


@dataclass(frozen=True)
class Item:
    prompt: str


def refuse(items: Sequence[Any]) -> list[GeneratedText]:
    raise AssertionError(f"these answers are stored: {items}")


def upper(prompt: str) -> GeneratedText:
    return GeneratedText(raw=prompt.upper(), token_ids=(1,))


def test_answers_are_computed_once(tmp_path: Path) -> None:
    computed: list[Item] = []

    def answer(items: Sequence[Item]) -> list[GeneratedText]:
        computed.extend(items)
        return [upper(item.prompt) for item in items]

    store = AnswerCache(tmp_path / "store", {"model": "m"})
    assert store.get([], refuse) == {}
    assert store.get([Item("a"), Item("a")], answer) == {Item("a"): upper("a")}
    assert store.get([Item("a"), Item("b")], answer) == {Item("a"): upper("a"), Item("b"): upper("b")}
    assert AnswerCache(tmp_path / "store", {"model": "m"}).get([Item("a")], refuse) == {Item("a"): upper("a")}
    assert computed == [Item("a"), Item("b")]
    AnswerCache(tmp_path / "store", {"model": "n"}).get([Item("a")], answer)
    assert len(computed) == 3


def test_a_file_of_an_earlier_version_stays_in_use(tmp_path: Path) -> None:
    """The table is that of release 0.1.0; its rows have other keys and are left alone."""
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT, checksum TEXT)")
        connection.execute("INSERT INTO answers VALUES ('old', '{}', 'sum')")
    AnswerCache(tmp_path, {"model": "m"}).get([Item("a")], lambda items: [upper(item.prompt) for item in items])
    assert AnswerCache(tmp_path, {"model": "m"}).get([Item("a")], refuse) == {Item("a"): upper("a")}
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (2,)
    assert not list(tmp_path.glob("*.damaged*"))
