"""``lm-edit sweep --keep-model``: runs of one worker in one process, with the results that they have alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import run_verb
from lm_runs import SHORT
from paths import RECORDS, ROOT
from saved_results import differences, evaluate_here, read_results

from edit_hooks.contract.tiny_models import save_tiny
from lm_edit.sweeps.execution.kept_process import KeptProcess
from lm_edit.sweeps.execution.runs import _end

MODULES = {
    "prints": "import os, sys; print(os.getpid(), *sys.argv[1:]); os.environ['LEFT'] = 'behind'",
    "leftover": "import os; print(os.environ.get('LEFT'), os.getcwd())",
    "fails": "raise KeyError('a reason')",
    "refuses": "import sys; sys.exit(2)",
    "sleeps": "import time; print('asleep', flush=True); time.sleep(60)",
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a module in the kept process: its exit code and what it printed; the lock is held as long as it runs."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    process = KeptProcess()

    def begin(*words):
        lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            return process.start([sys.executable, "-m", *words], tmp_path / "log.txt", {"SOME": "variable"}, lock)
        finally:
            os.close(lock)

    def run(*words):
        running = begin(*words)
        deadline = time.monotonic() + 60
        while (code := running.poll()) is None:
            if time.monotonic() > deadline:
                _end(running)
                pytest.fail("the run has no end")
            time.sleep(0.01)
        return code, (tmp_path / "log.txt").read_text()

    run.begin, run.log = begin, tmp_path / "log.txt"
    yield run
    process.close()


def test_runs_share_a_process_and_leave_it_as_it_was(start):
    first, second = start("prints", "a", "b c"), start("prints", "d")
    assert first[0] == second[0] == 0 and first[1].split()[1:] == ["a", "b", "c"]
    assert first[1].split()[0] == second[1].split()[0]
    assert start("leftover") == (0, f"None {os.getcwd()}\n")


def test_a_request_may_be_longer_than_a_buffer(start):
    """The second one goes through the channel on which the end of the first was asked for."""
    words = ["x" * 300_000, "y" * 300_000]
    assert start("prints", "a")[0] == 0
    code, log = start("prints", *words)
    assert code == 0 and log.split()[1:] == words


@pytest.mark.parametrize(("module", "code", "text"), [("fails", 1, "KeyError: 'a reason'"), ("refuses", 2, "")])
def test_a_failed_run_ends_the_process(start, module, code, text):
    before = start("prints")[1]
    failed, log = start(module)
    assert failed == code and text in log
    assert start("prints")[1] != before


def test_a_stopped_run_ends_the_process_and_the_next_has_another(start):
    """By an interrupt, also where a shell in the background has let the parent ignore them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        running = start.begin("sleeps")
    finally:
        signal.signal(signal.SIGINT, before)
    while "asleep" not in start.log.read_text():
        time.sleep(0.01)
    assert running.poll() is None
    _end(running)
    assert running.poll() == 1 and "KeyboardInterrupt" in start.log.read_text()
    assert start("prints")[0] == 0


def test_results_are_those_of_single_processes(tmp_path: Path, capsys) -> None:
    model = save_tiny(tmp_path, "llama")
    plan = {
        "description": "two editors",
        "models": {"tiny": {"pretrained": str(model)}},
        "editors": [{"editor": name, "editor_args": {"layers": [1], "num_steps": 3}} for name in ("ft_m", "grace")],
        "modes": ["single"],
        "benchmarks": [{"name": "bake", "tasks": ["bake_es"], "metadata": {"data": str(RECORDS / "bake_qa.jsonl")}}],
        "model_args": {"store": str(tmp_path / "store")},
        "lm_eval": {"gen_kwargs": SHORT},
        "limit": 2,
        "resources": {"cpus": 1},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert run_verb(["sweep", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "runs"), "--keep-model"]) == 0
    runs = {name: next((tmp_path / "runs").glob(f"tiny-{name}-*")) for name in ("ft_m", "grace")}
    loads = ["device map was set" in (runs[name] / "log.txt").read_text() for name in runs]
    assert loads == [True, True]  # each run asks for the model
    bars = ["Loading weights" in (runs[name] / "log.txt").read_text() for name in runs]
    assert bars == [True, False]  # and the second one finds it
    files = [next((folder / "results").rglob("results_*.json")) for folder in runs.values()]
    machines = {json.loads(file.read_text(encoding="utf-8"))["pretty_env_info"] for file in files}
    assert len(machines) == 1 and "PyTorch version" in machines.pop()
    arguments = f"pretrained={model},editor=grace,editor_args=layers:[1];num_steps:3,store={tmp_path / 'other'}"
    evaluate_here(tmp_path / "alone", arguments, ["bake_es"], RECORDS / "bake_qa.jsonl", limit=2)
    kept, alone = read_results(runs["grace"] / "results"), read_results(tmp_path / "alone")
    assert not differences(kept["samples"], alone["samples"], 0.0)[:5]


def test_only_runs_of_this_machine_share_a_process(tmp_path: Path, capsys) -> None:
    assert run_verb(["sweep", "example", "--out", str(tmp_path), "--keep-model", "--on", "slurm"]) == 2
    assert "--keep-model is for runs on this machine, not --on slurm" in capsys.readouterr().err
