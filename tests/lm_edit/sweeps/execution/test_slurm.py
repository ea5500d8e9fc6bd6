"""Jobs of Slurm that end without a result: the reason and the advice are those of the cause."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run_verb
from fake_harness import executions, install
from paths import ROOT

from lm_edit.sweeps.execution.slurm import SlurmRun

PLAN = "editors: [rome]\nbenchmarks: [bake_es]\nlimit: 2\nresources: {cpus: 1, hours: 0.05}\n"


def ended_with(message: str) -> SlurmRun:
    def fail() -> None:
        raise RuntimeError(message)

    paths = SimpleNamespace(stderr="/out/slurm/7_0_log.err")
    return SlurmRun(SimpleNamespace(result=fail, paths=paths), "time limit of 2 h reached (resources: hours)")


@pytest.mark.parametrize(
    ("message", "state", "reason"),
    [
        (
            "Job (task=0) failed during processing with trace:\n-----\nTraceback (most recent "
            "call last):\n  ...\nOSError: [Errno 122] Disk quota exceeded\n\n-----\nYou can check full logs",
            "failed",
            "the worker ended without a result (OSError: [Errno 122] Disk quota exceeded)",
        ),
        (
            "Job 7 (task: 0) with path /out/7_0_result.pkl\nhas not produced any output (state: OUT_OF_MEMORY)\nmore",
            "failed",
            "with path /out/7_0_result.pkl has not produced any output (state: OUT_OF_MEMORY))",
        ),
        (
            "Job 7 (task: 0) with path /out/7_0_result.pkl\nhas not produced any output (state: TIMEOUT)\nmore",
            "interrupted",
            "time limit of 2 h reached (resources: hours); the same command continues it",
        ),
        ("", "failed", "the worker ended without a result (RuntimeError)"),
    ],
)
def test_the_reason_is_the_line_with_the_cause_and_the_log(message: str, state: str, reason: str) -> None:
    outcome = ended_with(message).result()
    assert outcome.state == state and reason in outcome.reason
    assert outcome.reason.endswith("\n  Slurm log: /out/slurm/7_0_log.err")


def signal_worker(variables: dict[str, str]) -> None:
    """Send the worker of the first run the signal by which Slurm announces the time limit."""
    while not executions(variables):
        time.sleep(0.02)
    run = executions(variables)[0][-1]
    worker = re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{run}/status").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert worker
    os.kill(int(worker[1]), signal.SIGUSR2)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="finds the worker in /proc")
def test_a_run_that_reaches_the_time_limit_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the limit nor the log was named, and the advice was --retry."""
    pytest.importorskip("submitit", reason="the library behind --on slurm is not installed")
    variables = install(tmp_path / "fake")
    for name, value in {**variables, "FAKE_SECONDS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), str(ROOT)]))
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN, encoding="utf-8")
    command = ["sweep", str(plan), "--out", str(out), "--on", "slurm", "--slurm-cluster", "local"]
    thread = threading.Thread(target=signal_worker, args=(variables,))
    thread.start()
    assert run_verb(command) == 1
    thread.join()
    printed = capsys.readouterr().out
    (log,) = (out / "slurm").glob("*_log.err")
    reason = "time limit of 0.05 h reached (resources: hours); the same command continues it"
    assert f"interrupted: demo, rome, bake_es, single\n{reason}\n  Slurm log: {log}" in printed
    last_lines = printed.split("0 of 1 runs have results")[1]
    assert f"interrupted: demo, rome, bake_es, single: {reason}" in last_lines
    assert "--retry" not in printed and "the same command executes the runs again" in last_lines
    assert run_verb([*command, "--status"]) == 0 and "1 interrupted" in capsys.readouterr().out
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert run_verb(command) == 0 and "1 of 1 runs have results" in capsys.readouterr().out
