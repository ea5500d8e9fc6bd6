"""Answers under edits that the store has are not asked for again, and what alters an answer is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hook_edits import SETTINGS
from judge_server import JudgeServer, ServerFault, serve
from lm_runs import FAST, answers, build, run
from paths import RECORDS

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.inference import decoding, reference, scoring
from edit_hooks.inference.effects.states import StateComparison
from edit_hooks.store import answer_cache
from edit_hooks.utils.storage import hashing
from edit_hooks.utils.storage.sqlite_cache import SQLiteCache

BAKE = ["bake_es", "bake_rq"]  # likelihoods and free answers
STREAM = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "num_edits": 3}


@pytest.fixture(scope="module")
def model_path(tiny_path: Callable[..., Path]) -> str:
    return str(tiny_path("llama"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of jobs that models are asked."""
    calls: list[int] = []

    def spied(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(len(arguments[place]))
            return function(*arguments)

        return call

    monkeypatch.setattr(scoring, "score", spied(scoring.score, 1))
    monkeypatch.setattr(decoding, "generate", spied(decoding.generate, 2))
    monkeypatch.setattr(reference, "score_reference", spied(reference.score_reference, 1))
    monkeypatch.setattr(reference, "generate_reference", spied(reference.generate_reference, 2))
    monkeypatch.setattr(StateComparison, "compare", spied(StateComparison.compare, 2))
    yield calls


RUNS: dict[str, dict[str, Any]] = {
    "single": {},
    "groups": {**STREAM, "mode": "batch", "group_size": 2, "editor": "ft_m", "editor_args": {"num_steps": 3}},
    "stream": {**STREAM, "retention": True, "checkpoints": "2"},
    "hooks": {"editor": "grace", "editor_args": SETTINGS["grace"]},
    "stream of hooks": {**STREAM, "editor": "grace", "editor_args": SETTINGS["grace"]},
    "context": {"editor": "ice", "editor_args": {}},
    "stream of contexts": {**STREAM, "editor": "ice", "editor_args": {}},
    "unedited": {"mode": "none"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_second_run_asks_nothing_and_answers_the_same(
    name: str, model_path: str, tmp_path: Path, asked: list[int]
) -> None:
    def without_report(found: list[Any]) -> list[str]:  # it names the seconds that the edit took
        return [str(replace(answer, edit=None)) for answer in found]

    without = answers(run(build(model_path, **RUNS[name]), BAKE, limit=3))
    first = answers(run(build(model_path, tmp_path, **RUNS[name]), BAKE, limit=3))
    assert asked and without_report(first) == without_report(without)
    asked.clear()
    again = answers(run(build(model_path, tmp_path, **RUNS[name]), BAKE, limit=3))
    assert not asked
    assert [str(answer) for answer in again] == [str(answer) for answer in first]
    run(build(model_path, tmp_path, **RUNS[name]), BAKE, limit=4)
    assert asked  # of the fourth case


def test_hidden_states_are_not_compared_again(model_path: str, tmp_path: Path, asked: list[int]) -> None:
    def once() -> list[Any]:
        settings = {"num_prefixes": 2}
        return answers(run(build(model_path, tmp_path), ["counterfact_evk_es"], "counterfact.jsonl", settings, limit=2))

    first = once()
    assert asked
    asked.clear()
    assert [str(answer) for answer in once()] == [str(answer) for answer in first]
    assert not asked


def test_a_loaded_edit_has_its_own_answers(
    model_path: str, tmp_path: Path, asked: list[int], tiny_model: Callable[..., Any]
) -> None:
    request = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia")
    for number, strength in enumerate((0.5, 0.1)):
        editor = load_editor("r_rome", {**FAST, "lr": strength})
        (delta,) = editor.edit(tiny_model("llama"), build_tokenizer("metaspace_bos"), [request])
        delta.save(tmp_path / f"{number}.safetensors")

    def loaded(number: int) -> list[str]:
        asked.clear()
        options = {"load_edit": str(tmp_path / f"{number}.safetensors"), "editor_args": None}
        return [str(answer) for answer in answers(run(build(model_path, tmp_path, **options), BAKE, limit=3))]

    first, second = loaded(0), loaded(1)
    assert asked and first != second
    assert loaded(0) == first and not asked


@pytest.mark.parametrize(
    "change",
    [
        {"editor_args": {**FAST, "lr": 0.4}},
        {"answer": "patch"},
        {"engine": "reference"},
        {"editor": "rome"},
        {"mode": "sequential", **STREAM},
        {"mode": "none"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_edit_or_way_to_answer_is_asked_again(
    change: dict[str, Any], model_path: str, tmp_path: Path, asked: list[int]
) -> None:
    def counts(**options: Any) -> int:
        asked.clear()
        run(build(model_path, tmp_path, **options), ["bake_es"], limit=2)
        return sum(asked)

    assert counts() > 0 and counts() == 0
    assert counts(**change) > 0
    assert counts() == 0


def test_after_a_judge_that_failed_no_task_asks_the_model_again(
    model_path: str, tmp_path: Path, asked: list[int]
) -> None:
    tasks = ["qaedit_wild_reliability", "qaedit_wild_generalization"]

    def judged_by(server: JudgeServer) -> dict[str, Any]:
        judge = {"backend": "openai", "model": "scripted", "base_url": server.url, "store": str(tmp_path / "verdicts")}
        return run(build(model_path, tmp_path), tasks, "qaedit.jsonl", {"judge": judge}, limit=3)

    with serve(lambda item, attempt: ServerFault(402)) as server, pytest.raises(EditingError, match="no credit left"):
        judged_by(server)
    assert asked
    asked.clear()
    with serve() as server:
        results = judged_by(server)["results"]
    assert not asked
    for task in tasks:
        (count,) = (value for name, value in results[task].items() if name.endswith("wild_judge_n,judge"))
        assert count == 3


def test_a_locked_store_is_waited_for_once_in_a_stream(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once per step and kind of request."""
    tries: list[str] = []

    def locked_database(self: SQLiteCache, operation: Callable[..., Any]) -> Any:
        tries.append(operation.__qualname__.split(".")[1])
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(SQLiteCache, "_run", locked_database)
    assert answers(run(build(model_path, tmp_path, **STREAM, retention=True), BAKE, limit=2))
    assert sorted(tries) == ["read", "write"]


def test_the_code_behind_answers_is_read_before_the_run(
    model_path: str, tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that changes on disk while edits are made is not part of what the imported code answers."""
    options = {"editor": "grace", "editor_args": SETTINGS["grace"]}
    lm = build(model_path, tmp_path, **options)
    original = hashing._read_module

    def changed(name: str, *arguments: Any) -> tuple[str, frozenset[str]]:
        digest, imports = original(name, *arguments)
        return ("changed" if name in ("edit_hooks.memory.codebook", scoring.__name__) else digest), imports

    with monkeypatch.context() as patch:
        patch.setattr(hashing, "_read_module", changed)
        run(lm, ["bake_es"], limit=2)
        hashing.code_fingerprint.cache_clear()  # as in another process
        asked.clear()
        run(build(model_path, tmp_path, **options), ["bake_es"], limit=2)
        assert asked
    hashing.code_fingerprint.cache_clear()


def test_an_interrupted_run_asks_only_for_what_is_missing(
    model_path: str, tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edits that are written into the weights (FT-M) are answered one after another."""
    options = {"editor": "ft_m", "editor_args": {"num_steps": 3, "layers": [1]}, "measure_edits": False}
    whole = answers(run(build(model_path, tmp_path / "whole", **options), ["bake_es"]))
    number = sum(asked)
    asked.clear()
    original, batches = scoring._score_batch, []

    def dies(*arguments: Any) -> Any:
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "_score_batch", dies)
        patch.setattr(answer_cache, "SECONDS_BETWEEN_WRITES", 1e9)
        with pytest.raises(KeyboardInterrupt):
            run(build(model_path, tmp_path, **options), ["bake_es"])
    asked.clear()
    resumed = answers(run(build(model_path, tmp_path, **options), ["bake_es"]))
    assert 0 < sum(asked) < number
    assert [str(answer.final) for answer in resumed] == [str(answer.final) for answer in whole]
