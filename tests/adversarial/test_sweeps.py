"""Sweeps that are killed, interrupted, run twice at once, or contain runs that fail; on clusters and on one machine.

The point is the scheduler, so ``python -m lm_eval`` is a stand-in here, except where the test says so.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lm_eval.tasks.manager
import pytest
from command_line import run_verb
from fake_harness import executions, install
from lm_eval.__main__ import cli_evaluate
from paths import RECORDS, ROOT

from edit_hooks.utils.storage.json_io import read_json
from lm_edit import load_results
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.execution.runs import RunOutcome, command_of, execute, is_locked, prepare
from lm_edit.sweeps.execution.schedule import run_all
from lm_edit.sweeps.planning.plan import load_plan

PLAN = """
description: three editors and the unedited model
editors: [unedited, rome, ft_m, ike]
benchmarks: [bake_es, bake_gs]
limit: 2
"""
FOUR_RUNS = 4
CLUSTER = "resources: {cpus: 1, hours: 0.1, memory: 100MB}\n"
FORK = multiprocessing.get_context("fork")  # modules are imported already


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of the stand-in, which is what runs start from here on; it takes half as long as a sweep's poll."""
    variables = install(tmp_path / "fake")
    for module in ("runs", "schedule"):
        monkeypatch.setattr(f"lm_edit.sweeps.execution.{module}.POLL_SECONDS", 0.01)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), str(ROOT)]))
    return variables


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN, encoding="utf-8")
    return path


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Start sweeps in processes of their own; what is left of them ends with the test."""
    processes = []

    def start(*arguments: object) -> Any:
        process = FORK.Process(target=_sweep, args=(list(map(str, arguments)),))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _sweep(arguments: list[str]) -> None:
    os._exit(run_verb(["sweep", *arguments]))  # without what pytest does at the end of a process


def sweep(*arguments: object) -> int:
    return run_verb(["sweep", *map(str, arguments)])


def scores(out: Path) -> dict[str, Any]:
    """Folder of a run -> its results."""
    return {
        path.relative_to(out).parts[0]: json.loads(path.read_text(encoding="utf-8"))["results"]
        for path in sorted(out.glob("*/results/*/results_*.json"))
    }


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_executions(fake: dict[str, str], number: int) -> None:
    """Wait until the runs have written this many lines."""
    wait_for(lambda: len(executions(fake)) >= number)


def test_ten_kills_give_the_uninterrupted_table(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, started: Any
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert sweep(plan, "--out", whole, "--workers", 4) == 0
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    for number in range(10):
        before = len(executions(fake))
        process = started(plan, "--out", killed)
        if number < FOUR_RUNS:  # at first wait for something to be killed
            wait_for_executions(fake, before + 1)
        time.sleep(0.02 * number)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if number % 2:  # as a machine that goes down: what the sweep had started, too
            _kill_runs(fake)
    assert sweep(plan, "--out", killed) == 0
    assert len(scores(whole)) == FOUR_RUNS
    assert scores(killed) == scores(whole)
    number_before = len(executions(fake))
    assert sweep(plan, "--out", killed) == 0  # nothing is left to do
    assert len(executions(fake)) == number_before


def _kill_runs(fake: dict[str, str]) -> None:
    lines = executions(fake)
    for process in {line[-1] for line in lines} - {line[-1] for line in lines if line[0] == "end"}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_run_that_outlives_its_sweep_is_not_repeated(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, started: Any
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "1")
    out = tmp_path / "out"
    process = started(plan, "--out", out, "--only", "rome")
    wait_for(lambda: bool(executions(fake)))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (folder,) = [path for path in out.iterdir() if "rome" in path.name]
    assert is_locked(folder)  # by the process of lm_eval
    assert execute(str(folder), {}).state == "busy"
    assert sweep(plan, "--out", out, "--only", "rome") == 0
    assert [line[0] for line in executions(fake)] == ["start", "end"]


def test_two_sweeps_at_once_execute_each_run_once(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, started: Any
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    sweeps = [started(plan, "--out", tmp_path / "out", "--workers", 2) for _ in range(2)]
    for process in sweeps:
        process.join()
    assert [process.exitcode for process in sweeps] == [0, 0]
    names = [line[1] for line in executions(fake) if line[0] == "start"]
    assert len(names) == len(set(names)) == FOUR_RUNS


def test_an_interrupt_ends_the_runs(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, started: Any, capfd: Any
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    out = tmp_path / "out"
    for number in (signal.SIGINT, signal.SIGTERM):
        before = len(executions(fake))
        process = started(plan, "--out", out, "--workers", 2)
        wait_for_executions(fake, before + 2)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == 128 + signal.SIGINT
        assert not any(map(is_locked, out.iterdir()))
    assert sweep(plan, "--out", out, "--status") == 0
    printed = capfd.readouterr().out
    assert printed.count("the same command continues where this one stopped") == 2
    assert "2 interrupted, 2 waiting" in printed


def test_an_interrupt_is_not_lost_in_a_callback(tmp_path: Path) -> None:
    """Python drops an exception that a signal raises inside a finalizer; here a callback drops it."""
    stopped = []

    class Endless:
        slots = 1

        def submit(self, folder: Path) -> Future[RunOutcome]:
            return Future()

        def stop(self) -> None:
            stopped.append(True)

        def close(self) -> None: ...

    def tick() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_all({tmp_path: ()}, Endless(), retry=False, report=lambda event: None, tick=tick)
    assert stopped == [True] and signal.getsignal(signal.SIGINT) is handler


class Limited:
    """An executor of a cluster that refuses more than ``limit`` jobs at a time."""

    slots = None

    def __init__(self, limit: int, error: BaseException) -> None:
        self.limit, self.error = limit, error
        self.jobs: list[tuple[Path, Future[RunOutcome]]] = []
        self.num_refused, self.stopped = 0, False

    def submit(self, folder: Path) -> Future[RunOutcome]:
        if sum(not job.done() for _, job in self.jobs) >= self.limit:
            self.num_refused += 1
            raise self.error
        self.jobs.append((folder, Future()))
        return self.jobs[-1][1]

    def end_one(self) -> None:
        """End the job that has run for longest."""
        for _, job in self.jobs:
            if not job.done():
                job.set_result(RunOutcome("done"))
                return

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None: ...


REFUSAL = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed"


def test_a_refused_submission_is_repeated_when_a_run_has_ended(tmp_path: Path, monkeypatch: Any) -> None:
    """It canceled the jobs that were queued or running."""
    monkeypatch.setattr("lm_edit.sweeps.execution.schedule.POLL_SECONDS", 0.001)
    executor, reported = Limited(2, RuntimeError(REFUSAL)), list[Any]()
    folders = {tmp_path / name: () for name in "abcd"}
    outcomes = run_all(folders, executor, retry=False, report=reported.append, tick=executor.end_one)
    assert {outcome.state for outcome in outcomes.values()} == {"done"} and len(outcomes) == 4
    assert [folder for folder, _ in executor.jobs] == list(folders) and not executor.stopped
    assert [event.folder for event in reported if event.state == "started"] == list(folders)
    assert executor.num_refused <= 3  # not at every poll


def test_a_submission_that_is_refused_for_good_is_a_failed_run(
    plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(
        "lm_edit.sweeps.execution.executors.make_executor", lambda *_, **__: Limited(0, RuntimeError(REFUSAL))
    )
    assert sweep(plan, "--out", tmp_path / "out", "--only", "rome") == 1
    printed = capsys.readouterr().out
    why = "it cannot be submitted (RuntimeError: sbatch: error: QOSMaxSubmitJobPerUserLimit)"
    assert f"[1/1] failed: demo, rome, bake_es+bake_gs, single\n{why}\n" in printed
    assert f"\nfailed: demo, rome, bake_es+bake_gs, single: {why}\n" in printed
    assert "started" not in printed and "log.txt" not in printed


def test_an_interrupt_within_a_submission_stops_all_runs(tmp_path: Path) -> None:
    executor = Limited(1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_all({tmp_path / "a": (), tmp_path / "b": ()}, executor, retry=False, report=lambda event: None)
    assert executor.stopped and len(executor.jobs) == 1


def test_a_failing_run_does_not_stop_the_rest(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("FAKE_FAILING", "rome")
    out = tmp_path / "out"
    assert sweep(plan, "--out", out) == 1
    printed = capsys.readouterr().out
    assert "failed: demo, rome, bake_es+bake_gs, single" in printed
    assert "lm_eval ended with exit code 3\n  | evaluating" in printed and "  | the last words of rome" in printed
    assert "3 of 4 runs have results" in printed
    number = len(executions(fake))
    monkeypatch.delenv("FAKE_FAILING")
    assert sweep(plan, "--out", out) == 1  # failed before: only --retry runs it again
    assert "failed before" in capsys.readouterr().out and len(executions(fake)) == number
    assert sweep(plan, "--out", out, "--status") == 1
    assert "3 done, 1 failed" in capsys.readouterr().out.replace("1 failed, 3 done", "3 done, 1 failed")
    assert sweep(plan, "--out", out, "--retry") == 0 and len(scores(out)) == FOUR_RUNS


def test_a_run_without_any_score_is_named_with_its_reason(
    fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """All edits of rome are refused; a later sweep of the same editor is warned before it begins."""
    monkeypatch.setenv("FAKE_REFUSING", "rome")
    out, name = tmp_path / "out", "demo, rome, bake_es+bake_gs, single"
    why = "no case of bake_es, bake_gs has a score (the edit has no relation id)"
    assert sweep(plan, "--out", out) == 0
    printed = capsys.readouterr().out
    assert f"done, no case scored: {name}: {why}" in printed and "] done, no case scored in " in printed
    assert sweep(plan, "--out", out, "--status") == 0
    printed = capsys.readouterr().out
    assert "3 done" in printed and "1 done, no case scored" in printed and printed.count(why) == 1
    assert sweep(plan, "--out", out, "--dry-run") == 0 and why in capsys.readouterr().out
    assert sweep(plan, "--out", tmp_path / "new", "--estimate-from", out, "--dry-run") == 0
    printed = capsys.readouterr().out
    for task in ("bake_es", "bake_gs"):
        assert f"{name}: in an earlier run, no case of {task} has a score (the edit has no relation id)" in printed
    monkeypatch.setenv("FAKE_REFUSED_TASKS", "1")
    assert sweep(plan, "--out", tmp_path / "half", "--only", "rome") == 0
    capsys.readouterr()
    assert sweep(plan, "--out", tmp_path / "half", "--only", "rome", "--status") == 0
    printed = capsys.readouterr().out
    assert "no case of bake_es has a score" in printed and "\n1 done\n" in printed


def test_torn_results_are_no_results(fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """lm-eval ended well, but the samples of the second task are not there."""
    monkeypatch.setenv("FAKE_TORN", "1")
    out = tmp_path / "out"
    assert sweep(plan, "--out", out, "--only", "rome") == 1
    assert "has no samples of bake_gs" in capsys.readouterr().out
    assert not list(out.glob("*/results"))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _cut(pattern: str, share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = sorted(folder.rglob(pattern))[0]
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return cut


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("{}", encoding="utf-8")


DAMAGES = {
    "emptied result file": (_cut("results_*.json", 0), "not valid JSON"),
    "truncated result file": (_cut("results_*.json", 0.5), "not valid JSON"),
    "truncated samples": (_cut("samples_bake_es_*.jsonl", 0.5), "1 documents in the samples, but 2 were asked"),
    "no files": (_empty, "no results_*.json"),
    "a file in place of the folder": (_replace_by_file, "results"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_results_are_no_results(damage: str, fake: Any, plan: Path, tmp_path: Path, capsys: Any) -> None:
    """They are named everywhere with their reason, and redone with --retry; nothing is deleted."""
    out, name = tmp_path / "out", "demo, rome, bake_es+bake_gs, single"
    assert sweep(plan, "--out", out, "--workers", 4) == 0
    before = scores(out)
    (folder,) = [path for path in out.iterdir() if "rome" in path.name]
    break_files, reason = DAMAGES[damage]
    break_files(folder / "results")
    number = len(executions(fake))
    capsys.readouterr()
    assert sweep(plan, "--out", out) == 1
    printed = capsys.readouterr().out
    last_lines = printed.split("3 of 4 runs have results")[1]
    assert f"damaged: {name}: " in last_lines and reason in last_lines and "--retry" in last_lines
    assert sweep(plan, "--out", out, "--status") == 1
    printed = capsys.readouterr().out
    assert "3 done" in printed and "1 damaged" in printed and reason in printed
    assert sweep(plan, "--out", out, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert f"damaged: {name}: " in printed and reason in printed and "4 runs; 1 of unknown length" in printed
    assert sweep(plan, "--out", out, "--only", "ike", "--dry-run") == 0  # the damaged run is none of those chosen
    capsys.readouterr()
    assert len(executions(fake)) == number
    assert sweep(plan, "--out", out, "--retry") == 0
    assert scores(out) == before and len(executions(fake)) == number + 2  # start and end
    assert (folder / "results.damaged-1").exists()
    assert len(set(load_results(out)["run"])) == FOUR_RUNS  # what was set aside is not read


def test_a_run_checks_results_that_appear_while_it_waits(fake: Any, plan: Path, tmp_path: Path) -> None:
    """A worker finds damaged results after the sweep has chosen its runs: it neither trusts nor replaces them."""
    out = tmp_path / "out"
    assert sweep(plan, "--out", out, "--only", "rome") == 0
    (folder,) = out.iterdir()
    assert execute(str(folder), {}).state == "done"
    _empty(folder / "results")
    outcome = execute(str(folder), {})
    assert outcome.state == "damaged" and "no results_*.json" in outcome.reason
    assert not any((folder / "results").iterdir())


@pytest.mark.parametrize("content", ["", '{"name": "x"}', "{}", None])
def test_damaged_settings_are_written_again(content: str | None, fake: Any, plan: Path, tmp_path: Path) -> None:
    """The plan has everything that run.json has; ``None``: a folder is in its place."""
    out = tmp_path / "out"
    assert sweep(plan, "--out", out, "--only", "rome") == 0
    (folder,) = out.iterdir()
    settings = folder / "run.json"
    whole = settings.read_text(encoding="utf-8")
    shutil.rmtree(folder / "results")
    settings.unlink()
    settings.mkdir() if content is None else settings.write_text(content, encoding="utf-8")
    assert sweep(plan, "--out", out, "--only", "rome", "--status") == 0
    assert sweep(plan, "--out", out, "--only", "rome") == 0
    assert settings.read_text(encoding="utf-8") == whole and len(scores(out)) == 1


def test_the_folder_of_the_runs_is_no_file(plan: Path, tmp_path: Path, capsys: Any) -> None:
    for action in ([], ["--status"], ["--dry-run"]):
        assert sweep(plan, "--out", plan, *action) == 2
        assert f"{plan} is a file; name a folder" in capsys.readouterr().err


def test_workers_share_cores_and_gpus(fake: Any, plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr("lm_edit.sweeps.execution.local.num_cores", lambda: 6)
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    assert sweep(plan, "--out", tmp_path / "out") == 0  # two GPUs, so two workers with three of the six cores each
    assert {tuple(line[2:4]) for line in executions(fake)} == {("3", "4"), ("3", "6")}
    greedy = tmp_path / "greedy.yaml"
    greedy.write_text(PLAN + "resources: {gpus: 2}\n", encoding="utf-8")
    assert sweep(greedy, "--out", tmp_path / "other", "--workers", 2) == 2
    assert "2 GPUs suffice for 1 runs with 2 each" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["slurm", "ray"])
def test_clusters_give_the_table_of_one_machine(
    name: str, fake: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip(
        "submitit" if name == "slurm" else "ray", reason=f"the library behind --on {name} is not installed"
    )
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.replace("unedited, rome, ft_m, ike", "rome, ft_m") + CLUSTER, encoding="utf-8")
    monkeypatch.setenv("FAKE_FAILING", "ft_m")
    options = ["--slurm-cluster", "local"] if name == "slurm" else []
    assert sweep(plan, "--out", tmp_path / "here", "--workers", 4) == 1
    capsys.readouterr()
    assert sweep(plan, "--out", tmp_path / "there", "--on", name, *options) == 1
    printed = capsys.readouterr().out
    assert "the last words of ft_m" in printed and "1 of 2 runs have results" in printed, printed
    assert scores(tmp_path / "here") == scores(tmp_path / "there") and len(scores(tmp_path / "here")) == 1


@pytest.fixture
def real_plan(tiny_path: Any, tmp_path: Path) -> Path:
    """One run on a tiny model, with the real lm_eval."""
    plan = tmp_path / "plan.yaml"
    model = {"pretrained": str(tiny_path("gpt2", "byte_bpe")), "data": str(RECORDS / "bake_qa.jsonl"), "store": "off"}
    plan.write_text(
        f"models: {{tiny: {json.dumps(model)}}}\neditors: [{{editor: ft_m, editor_args: {{num_steps: 1}}}}]\n"
        "benchmarks: [bake_es]\nlimit: 1\n",
        encoding="utf-8",
    )
    return plan


def _check_table(plan: Path, out: Path, capsys: Any) -> None:
    table = load_results(out)
    assert set(table["editor"]) == {"ft_m"} and set(table["task"]) == {"bake_es"}
    capsys.readouterr()
    assert sweep(plan, "--out", out, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "done" in printed and "untuned" in printed and "unknown" not in printed


def test_the_command_of_a_run_is_one_of_lm_eval(real_plan: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """lm-eval's own command line, in this process: what it writes is a complete attempt, which the sweep adopts."""
    loaded = load_plan(real_plan)
    (run,) = check_plan(loaded).runs
    folder = prepare(tmp_path / "out", run)
    command = command_of(read_json(folder / "run.json"), folder / "attempt")
    monkeypatch.setattr("sys.argv", command[2:])
    # lm-eval's own thousands of tasks are not indexed
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "built_in" / "manager.py"))
    cli_evaluate()
    monkeypatch.setattr("lm_edit.sweeps.execution.runs.subprocess.Popen", None)  # nothing is left to run
    assert sweep(real_plan, "--out", tmp_path / "out") == 0
    assert (folder / "results").is_dir() and not (folder / "attempt").exists()
    _check_table(real_plan, tmp_path / "out", capsys)


@pytest.mark.slow
def test_a_real_sweep_is_read_as_a_table(real_plan: Path, tmp_path: Path, capsys: Any) -> None:
    """As the test above in a process of its own, in which lm-eval describes the machine."""
    assert sweep(real_plan, "--out", tmp_path / "out") == 0, capsys.readouterr().out
    _check_table(real_plan, tmp_path / "out", capsys)
