"""A real OpenAI-compatible server: `transformers serve` with a tiny judge model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_server import labels_of
from scripted import ScriptedLM
from task_runs import metrics_of, run
from transformers.utils.import_utils import is_serve_available

from judges.base import CORRECT, INCORRECT, Item
from judges.model.factory import make_model_judge

TASK = "qaedit_wild_reliability"


@pytest.fixture(scope="module")
def url(reader: Path) -> Iterator[str]:
    """Address of `transformers serve` on loopback, offline."""
    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi and uvicorn (extra test)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(reader), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = reader.parent / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=output, stderr=output, env=environment
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"transformers serve did not start:\n{log.read_text()[-2000:]}")


def test_server_and_local_model_give_the_same_replies(url: str, reader: Path, prompt: str, tmp_path: Path) -> None:
    settings = {"backend": "openai", "model": str(reader), "base_url": url, "prompt": prompt, "store": str(tmp_path)}
    judge = make_model_judge(settings | {"concurrency": 2})
    judge.backend.check()
    items = [Item(f"Is it so, {n}?", "yes", ("yes!", "no?", "Ada!")[n % 3]) for n in range(9)]
    judged = judge.judge(items)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT] * 3
    assert judged.report.num_calls >= 9 and judged.report.prompt_tokens > 0  # a busy machine may need a retry
    local_settings = {"backend": "hf", "model": str(reader), "prompt": prompt, "store": "off", "device": "cpu"}
    local = make_model_judge(local_settings).judge(items)
    assert [verdict.raw_reply for verdict in judged.verdicts] == [verdict.raw_reply for verdict in local.verdicts]

    def texts(context: str, unedited: bool) -> str:
        return " Orsa Lind!" if "Fenwick" in context else " what?"

    results = run(TASK, ScriptedLM(texts=texts), {"judge": json.dumps(settings), "population": "all"})
    assert metrics_of(results, TASK, "judge")["efficacy_wild_judge"] == 0.25
    assert metrics_of(results, TASK)["efficacy_wild_em"] == 0.25
