"""Answers on disk: the file format, the identity of a stored answer, and what an interrupted run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from edit_hooks.answers import GeneratedText
from edit_hooks.store import answer_cache
from edit_hooks.store.answer_cache import AnswerCache
from edit_hooks.utils.progress import Finished


@dataclass(frozen=True)
class Item:
    prompt: str


def refuse(missing: Sequence[int], _finished: Finished) -> None:
    raise AssertionError(f"these answers are stored: {missing}")


def upper(prompt: str) -> GeneratedText:
    return GeneratedText(raw=prompt.upper(), token_ids=(1,))


class Model:
    """Answers in batches of two, last ones first; records what it was asked."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.asked: list[str] = []
        self.fails_at = fails_at

    def ask(self, cache: AnswerCache, *prompts: str, edit: str | None = None) -> list[GeneratedText]:
        items = [Item(prompt) for prompt in prompts]

        def compute(missing: Sequence[int], finished: Finished) -> None:
            places = list(range(len(missing)))[::-1]
            for start in range(0, len(places), 2):
                batch = places[start : start + 2]
                texts = [prompts[missing[place]] for place in batch]
                if self.fails_at in texts:
                    raise KeyboardInterrupt
                self.asked += texts
                finished(batch, [upper(text) for text in texts])

        return cache.get(items, [{} if edit is None else {"edit": edit}] * len(items), compute)


def test_answers_are_computed_once(tmp_path: Path) -> None:
    model, store = Model(), AnswerCache(tmp_path / "store", {"model": "m"})
    assert store.get([], [], refuse) == []
    assert model.ask(store, "a", "a") == [upper("a"), upper("a")]
    assert model.ask(store, "b", "a", "c", "b") == [upper("b"), upper("a"), upper("c"), upper("b")]
    assert AnswerCache(tmp_path / "store", {"model": "m"}).get([Item("a")], [{}], refuse) == [upper("a")]
    assert sorted(model.asked) == ["a", "b", "c"]
    model.ask(AnswerCache(tmp_path / "store", {"model": "n"}), "a")
    model.ask(store, "a", edit="e")
    model.ask(store, "a", edit="f")
    assert model.asked[3:] == ["a", "a", "a"]


def test_an_interrupted_run_keeps_its_answers(tmp_path: Path) -> None:
    prompts = ("a", "b", "c", "d", "e")
    with pytest.raises(KeyboardInterrupt):
        Model(fails_at="b").ask(AnswerCache(tmp_path, {}), *prompts)
    model = Model()
    assert model.ask(AnswerCache(tmp_path, {}), *prompts) == [upper(prompt) for prompt in prompts]
    assert model.asked == ["c", "b", "a"]  # the last two had been answered


def test_a_killed_run_loses_the_last_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are written on the way: a second reader finds them while the first still computes."""
    monkeypatch.setattr(answer_cache, "SECONDS_BETWEEN_WRITES", 0.0)
    items = [Item("a"), Item("b")]

    def compute(missing: Sequence[int], finished: Finished) -> None:
        finished([0], [upper("a")])
        assert AnswerCache(tmp_path, {}).get(items[:1], [{}], refuse) == [upper("a")]
        finished([1], [upper("b")])

    AnswerCache(tmp_path, {}).get(items, [{}, {}], compute)
