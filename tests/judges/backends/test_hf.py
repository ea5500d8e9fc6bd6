"""Judges in this process, and a real OpenAI-compatible server: `transformers serve` with a tiny model made for it."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import labels_of
from scripted import ScriptedLM
from task_runs import metrics_of, run
from tiny import build_model, build_tokenizer, save_tiny
from transformers.utils.import_utils import is_serve_available

from edit_hooks.utils.errors import EditingError
from judges.backends.hf import LocalModel, shares_weights
from judges.base import CORRECT, INCORRECT, Item
from judges.model.factory import make_model_judge
from judges.settings import read_settings

# The whole conversation, so that the last token of the prompt is the last mark of the answer.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "---\nquoting: raw\n---\n{question} {gold}\n{answer}"
ITEMS = [
    Item("Is it so?", "yes", "yes!"),
    Item("Is it so?", "yes", "no?"),
    Item("Who was it in the end?", "Ada", "Ada!"),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that says A after "!" and B after "?": attention and MLP write nothing, the head reads the last token."""
    folder = save_tiny(tmp_path_factory.mktemp("reader"), "llama", "byte_bpe_bos", max_position_embeddings=2048)
    tokenizer = build_tokenizer("byte_bpe_bos")
    model = build_model("llama", tokenizer_kind="byte_bpe_bos", max_position_embeddings=2048)
    ids = {mark: tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "!?AB"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        head.zero_()
        end = tokenizer.eos_token_id
        for place, (seen, said) in enumerate(
            [(ids["!"], ids["A"]), (ids["?"], ids["B"]), (ids["A"], end), (ids["B"], end)]
        ):
            embedding[seen, place] = 1.0
            head[said, place] = 1.0
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 2048
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "reader.txt"
    path.write_text(PROMPT, encoding="utf-8")
    return str(path)


def given(reader: Path, prompt: str, **more: Any) -> dict[str, Any]:
    return {"backend": "hf", "model": str(reader), "prompt": prompt, "store": "off", "device": "cpu", **more}


# ------------------------------------------------------------------ in process


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_verdicts_of_a_local_model(reader: Path, prompt: str, batch_size: int) -> None:
    judged = make_model_judge(given(reader, prompt, batch_size=batch_size)).judge(ITEMS)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT]
    assert [verdict.raw_reply for verdict in judged.verdicts] == ["A", "B", "A"]
    assert judged.report.num_calls == 3 and judged.report.reply_tokens == 6


def test_the_model_is_loaded_late_and_released(reader: Path, prompt: str) -> None:
    judge = make_model_judge(given(reader, prompt))
    backend = judge.backend
    assert isinstance(backend, LocalModel)
    backend.check()
    judge.plan(ITEMS)
    assert not backend.loaded
    backend._load()
    kept = weakref.ref(backend._model)
    judge.judge(ITEMS)
    gc.collect()
    assert not backend.loaded and kept() is None
    judge.judge(ITEMS)
    assert not backend.loaded  # everything was in the store: nothing was loaded


def test_the_model_is_released_after_a_failure(reader: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_model_judge(given(reader, prompt))
    monkeypatch.setattr(LocalModel, "_generate", lambda self, prompts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judge.judge(ITEMS)
    assert not judge.backend.loaded  # type: ignore[attr-defined]


def test_a_batch_that_does_not_fit_is_halved(reader: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, sizes = LocalModel._generate, []

    def small(self: LocalModel, prompts: list[str]) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError
        return generate(self, prompts)

    monkeypatch.setattr(LocalModel, "_generate", small)
    judged = make_model_judge(given(reader, prompt)).judge(ITEMS)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT] and sizes == [3, 1, 2, 1, 1]

    def never(self: LocalModel, prompts: list[str]) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LocalModel, "_generate", never)
    with pytest.raises(EditingError, match="single prompt does not fit"):
        make_model_judge(given(reader, prompt)).judge(ITEMS)


def test_the_edited_model_is_refused(reader: Path, prompt: str) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    settings = read_settings(given(reader, prompt))
    for edited in (model, build_tied(model)):
        with pytest.raises(EditingError, match="shares weights"):
            LocalModel(settings, model, tokenizer, edited=edited)
    other = build_model("llama", seed=1)
    assert not shares_weights(model, other)
    assert LocalModel(settings, model, tokenizer, edited=other).loaded
    with pytest.raises(EditingError, match="being edited"):
        make_model_judge(given(reader, prompt), edited=f"{reader}/")
    assert make_model_judge(given(reader, prompt, allow_edited_checkpoint=True), edited=str(reader))


def build_tied(model: Any) -> Any:
    """Another model object on the first one's embedding."""
    other = build_model("llama", seed=2)
    other.get_input_embeddings().weight = model.get_input_embeddings().weight
    return other


def test_a_model_that_is_handed_in_is_left_alone(reader: Path, prompt: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = read_settings(given(reader, prompt))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(reader), AutoTokenizer.from_pretrained(reader)
    backend = LocalModel(settings, model, tokenizer)
    asked = backend.ask([[{"role": "user", "content": "so!"}]], lambda index, reply: None)
    assert asked.outcomes[0].text == "A" and backend.loaded  # type: ignore[union-attr]


def test_a_checkpoint_that_is_none_is_an_error_before_the_run(tmp_path: Path, prompt: str) -> None:
    with pytest.raises(EditingError, match="cannot be loaded"):
        make_model_judge(given(tmp_path, prompt)).backend.check()


def test_wild_tasks_with_a_local_judge(reader: Path, prompt: str, tmp_path: Path) -> None:
    def texts(context: str, unedited: bool) -> str:
        return " Orsa Lind!" if "Fenwick" in context else " what?"

    settings = {"judge": given(reader, prompt, store=str(tmp_path)), "initially_wrong": False}
    task = "qaedit_wild_reliability"
    found = metrics_of(run(task, ScriptedLM(texts=texts), settings), task, "judge")
    assert found["reliability_wild_judge"] == 0.25 and found["reliability_wild_judge_n"] == 4


# ------------------------------------------------------------------ a real server


@pytest.fixture(scope="module")
def served(reader: Path) -> Iterator[str]:
    """`transformers serve` on loopback, offline; the address of its interface."""
    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi and uvicorn (extra test)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", str(reader), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = reader.parent / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=output, stderr=output, env=environment
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(url: str, process: subprocess.Popen, log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"transformers serve did not start:\n{log.read_text()[-2000:]}")


def test_a_real_server_end_to_end(served: str, reader: Path, prompt: str, tmp_path: Path) -> None:
    asked = {"backend": "openai", "model": str(reader), "base_url": served, "prompt": prompt, "store": str(tmp_path)}
    judge = make_model_judge(asked | {"concurrency": 2})
    judge.backend.check()
    items = [ITEMS[n % 3]._replace(question=f"Is it so, {n}?") for n in range(9)]
    judged = judge.judge(items)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT] * 3
    assert judged.report.num_calls >= 9 and judged.report.prompt_tokens > 0  # a busy machine may need a second try
    local = make_model_judge(given(reader, prompt)).judge(items)
    assert [verdict.raw_reply for verdict in judged.verdicts] == [verdict.raw_reply for verdict in local.verdicts]

    def texts(context: str, unedited: bool) -> str:
        return " Orsa Lind!" if "Fenwick" in context else " what?"

    task = "qaedit_wild_reliability"
    results = run(task, ScriptedLM(texts=texts), {"judge": json.dumps(asked), "initially_wrong": False})
    assert metrics_of(results, task, "judge")["reliability_wild_judge"] == 0.25
    assert metrics_of(results, task)["reliability_wild_em"] == 0.25
