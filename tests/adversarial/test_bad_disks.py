"""Caches on disks that are full, read-only, locked, emptied or pruned: the run continues with the same results."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import serve
from lm_runs import answers, build, flat, run
from paths import RECORDS
from scripted import ScriptedLM
from task_runs import run as run_scripted
from wild_answers import WILD_TASK, wild_texts

from edit_hooks.contract.tiny_models import SENTENCES, build_model, build_tokenizer
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.saving.export import export_merged, export_peft
from edit_hooks.locate.moments.null_space import null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.store.store import Store
from edit_hooks.utils.storage import files, sqlite_cache
from edit_hooks.utils.storage.outputs import disk_errors

resource = pytest.importorskip("resource")  # POSIX only

STREAM = {"mode": "sequential", "edits": "bake", "num_edits": 3, "data": str(RECORDS / "bake_qa.jsonl")}
SINGLE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def answer(tiny_path: Any) -> Callable[..., Any]:
    """Answers of a run with a store; equal for equal runs, also after a trip through JSON."""
    model = str(tiny_path("gpt2"))

    def evaluate(store: Any, options: dict[str, Any]) -> Any:
        lm = build(model, editor="r_rome", editor_args={"num_steps": 1}, store=str(store), **options)
        return json.loads(json.dumps([flat(each) for each in answers(run(lm, ["bake_ls"], limit=2))]))

    return evaluate


@pytest.fixture(scope="module")
def right(answer: Any) -> Callable[[Any], Any]:
    """Answers without a store."""
    cached = functools.cache(lambda mode: answer("off", STREAM if mode else SINGLE))
    return lambda options: cached(bool(options))


@pytest.fixture(autouse=True)
def _warnings_logged_again() -> Iterator[None]:
    files._warn_unwritable.cache_clear()
    sqlite_cache._warn_unusable.cache_clear()
    yield


def on_a_full_disk(work: Callable[[], Any]) -> Any:
    """Result of ``work`` while the kernel refuses this process to write a byte to any file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The captured output of a test is written to files, too.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            return work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_changes_no_answer(answer: Any, right: Any, tmp_path: Path) -> None:
    options = STREAM
    assert on_a_full_disk(lambda: answer(tmp_path / "store", options)) == right(options)
    assert not Store(tmp_path / "store").size() and answer(tmp_path / "store", options) == right(options)
    assert Store(tmp_path / "store").size()["deltas"][0] >= 2
    assert on_a_full_disk(lambda: answer(tmp_path / "store", options)) == right(options)  # and reads what is there


def test_a_store_that_cannot_be_written_from_the_start(
    answer: Any, right: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer(Path("/proc/no/store"), SINGLE) == right(SINGLE)
    warnings = [message for message in caplog.messages if "cannot write to" in message or "cannot use the" in message]
    assert [message.split(":")[0] for message in warnings].count("cannot write to /proc/no/store") == 1, warnings
    assert len(warnings) <= 2 and all("The run continues" in message for message in warnings)


def test_a_store_that_disappears_during_the_run(
    answer: Any, right: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Delta.save

    def save_and_remove_everything(delta: Delta, path: Path, **options: Any) -> None:
        save(delta, path, **options)
        shutil.rmtree(tmp_path / "store")

    monkeypatch.setattr(Delta, "save", save_and_remove_everything)
    assert answer(tmp_path / "store", SINGLE) == right(SINGLE)


def test_a_store_that_is_pruned_during_the_run(
    answer: Any, right: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, over, removed = Store(tmp_path / "store"), threading.Event(), list[int]()

    def prune_again_and_again() -> None:
        while not over.wait(0.002):
            removed.append(store.prune(0))

    answer(store.root, STREAM)
    thread = threading.Thread(target=prune_again_and_again)
    thread.start()
    try:
        assert answer(store.root, STREAM) == right(STREAM)
    finally:
        over.set()
        thread.join()
    assert sum(removed) >= 4
    assert not [message for message in caplog.messages if "damaged" in message or "goes on" in message]


def test_an_edit_pruned_between_two_looks_is_a_silent_miss(
    answer: Any, right: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(tmp_path, SINGLE)
    load = Delta.load.__func__

    def load_what_was_pruned(cls: type[Delta], path: Path) -> Delta:
        path.unlink(missing_ok=True)
        return load(cls, path)

    monkeypatch.setattr(Delta, "load", classmethod(load_what_was_pruned))
    caplog.clear()
    assert answer(tmp_path, SINGLE) == right(SINGLE)
    assert "computed again" not in caplog.text


def test_statistics_on_a_full_disk(tiny_model: Any, tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gpt2"), build_tokenizer("byte_bpe")

    def compute(folder: Path) -> Any:
        settings = MomentSettings(list(SENTENCES), max_length=16)
        moment = second_moments(model, tokenizer, [1], settings, folder=folder, quiet=True)[1]
        return [moment.matrix_FF.tolist(), null_space_of(moment, None, 0.3, None).basis_FR.tolist()]

    assert on_a_full_disk(lambda: compute(tmp_path / "a")) == compute(tmp_path / "b")
    assert not [path for path in (tmp_path / "a").rglob("*") if path.is_file() and path.stat().st_size]


def test_verdicts_that_cannot_be_stored_are_paid_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the verdicts nor the answers that wait for them can be written."""
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        given = {"backend": "openai", "model": "m", "base_url": server.url}
        results = [
            run_scripted(WILD_TASK, ScriptedLM(texts=wild_texts), {"judge": {**given, "store": str(store)}})
            for store in (tmp_path / "good", Path("/proc/no/store"))
        ]
    scores = [{key: value for key, value in each["results"][WILD_TASK].items() if "judge" in key} for each in results]
    assert scores[0] == scores[1] and "The run continues" in caplog.text


@pytest.mark.parametrize("form", ["merged", "peft"])
def test_an_export_to_a_full_disk_is_a_message_and_leaves_nothing(form: str, tmp_path: Path) -> None:
    """safetensors and tokenizers report the kernel's reason in exceptions of their own."""
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    map_name = "transformer.h.1.mlp.c_proj"
    delta = Delta(factors={map_name: Factor(torch.ones(32, 1), torch.ones(128, 1), transposed=True)})
    target = tmp_path / "out"
    export = {
        "merged": lambda: export_merged(model, tokenizer, delta, target),
        "peft": lambda: export_peft(delta, target),
    }[form]
    with pytest.raises(OSError, match="File too large"):
        on_a_full_disk(export)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"cannot write .* \(os error 28\)"), disk_errors(target):
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it
    with pytest.raises(KeyError), disk_errors(target):
        raise KeyError("another fault")
