"""Answers of the unedited model on disk: the file format, and what a stored answer depends on."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edit_hooks.store import answer_cache
from edit_hooks.store.answer_cache import AnswerStore


@dataclass(frozen=True)
class Item:
    prompt: str


def refuse(items: Sequence[Any]) -> list[dict[str, Any]]:
    raise AssertionError(f"these answers are stored: {items}")


def test_answers_are_computed_once(tmp_path: Path) -> None:
    computed: list[Item] = []

    def answer(items: Sequence[Item]) -> list[dict[str, Any]]:
        computed.extend(items)
        return [{"text": item.prompt.upper()} for item in items]

    store = AnswerStore(tmp_path / "store", {"model": "m"})
    assert store.ask([], refuse) == {}
    assert store.ask([Item("a"), Item("a")], answer) == {Item("a"): {"text": "A"}}
    assert store.ask([Item("a"), Item("b")], answer) == {Item("a"): {"text": "A"}, Item("b"): {"text": "B"}}
    assert AnswerStore(tmp_path / "store", {"model": "m"}).ask([Item("a")], refuse) == {Item("a"): {"text": "A"}}
    assert computed == [Item("a"), Item("b")]
    AnswerStore(tmp_path / "store", {"model": "n"}).ask([Item("a")], answer)
    assert len(computed) == 3


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table and row as written before the two SQLite caches were merged."""
    monkeypatch.setattr(answer_cache, "code_fingerprint", lambda: "0" * 64)
    connection = sqlite3.connect(tmp_path / "answers.sqlite")
    with connection:
        connection.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT, checksum TEXT)")
        connection.execute(
            "INSERT INTO answers VALUES (?, ?, ?)",
            (
                "e5cece597a0d1b27f5dec5d8c9e9b8e28b4d2e019be5e4c5ee415aa2b44518ac",
                '{"text": "A"}',
                "d80e6328dba8321f73555882af8d2f2ee5a7fcb8bc5da5ee34961534b0205700",
            ),
        )
    connection.close()
    assert AnswerStore(tmp_path, {"model": "m"}).ask([Item("a")], refuse) == {Item("a"): {"text": "A"}}
