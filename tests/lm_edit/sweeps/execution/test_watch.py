"""A sweep's folder while its runs are executed: states, shares and time left by files alone."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from result_files import change, write_run

from edit_hooks import EditingError
from lm_edit.cli.main import main
from lm_edit.sweeps.execution.runs import LOG, RESULTS, SETTINGS, RunOutcome, _locked
from lm_edit.sweeps.execution.schedule import Event, run_all
from lm_edit.sweeps.execution.status import Progress
from lm_edit.sweeps.execution.watch import SweepFolder

BAR = "\rScoring under edits:  38%|###   | 96/256 [00:10<00:16,  9.71prompt/s]"


def prepared(out: Path, name: str, *, limit: int = 4) -> Path:
    folder = out / name
    folder.mkdir(parents=True)
    content = {"name": name, "tasks": ["bake_es"], "model_args": {"editor": name}, "limit": limit, "metadata": {}}
    (folder / SETTINGS).write_text(json.dumps(content | {"lm_eval": {}}))
    return folder


def finish(folder: Path, seconds: float) -> None:
    path = write_run(folder / RESULTS)
    change(path, lambda content: content.update(total_evaluation_time_seconds=str(seconds)))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Of four runs one is done, one is executed, one waits, and one has failed."""
    for name in ("done", "running", "waiting", "broken"):
        prepared(tmp_path, name)
    finish(tmp_path / "done", 90.0)
    (tmp_path / "running" / LOG).write_text(f"a line\n{BAR}")
    (tmp_path / "broken" / "failed.json").write_text(json.dumps({"reason": "out of memory"}))
    return tmp_path


def test_shares_rates_and_what_waits(out):
    watched = SweepFolder(out)
    with _locked(out / "running"):
        seen = watched.read()
    rows = {row[5]: row for row in seen.rows}
    assert rows["running"][:5] == ("running", "Scoring under edits", "38%", "9.71prompt/s", "00:16")
    assert rows["waiting"][0] == "waiting" and rows["waiting"][6] == "waits for a place beside 1 running"
    assert rows["broken"][0] == "failed" and rows["broken"][6] == "out of memory"
    counts, cases, left = seen.summary
    assert counts == "1 failed, 1 done, 1 running, 1 waiting" and not seen.has_ended and seen.has_failed
    assert cases == "4 of 16 cases are in finished runs (25%)"
    assert re.fullmatch(r"about 3(\.0)? min left, at (1\.5 min|90 s) per finished run", left)
    assert {row[5]: row for row in watched.read().rows}["waiting"][6] == "no process executes the sweep"


def test_the_command_ends_with_the_sweep_and_needs_one(out, capsys, monkeypatch):
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        for name in ("running", "waiting"):
            finish(out / name, 30.0)

    monkeypatch.setattr("lm_edit.cli.evaluating.results.time.sleep", sleep)
    assert main(["results", "watch", str(out), "--once"]) == 1 and not waits  # one has failed
    assert main(["results", "watch", str(out), "--every", "2"]) == 1 and waits == [2.0]
    *_, counts, cases = capsys.readouterr().out.splitlines()
    assert counts == "1 failed, 3 done" and cases.startswith("12 of 16 cases")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["results", "watch", str(out), "--once"]) == 1
    assert capsys.readouterr().out.startswith("\x1b[H\x1b[2Jstate")  # a terminal is cleared first
    (out / "empty").mkdir()
    with pytest.raises(EditingError, match="has no runs of a sweep"):
        SweepFolder(out / "empty")


def test_the_command_ends_if_no_process_executes_the_sweep(tmp_path, capsys):
    prepared(tmp_path, "waiting")
    assert main(["results", "watch", str(tmp_path), "--every", "0.01", "--patience", "0.02"]) == 1
    assert "no process has executed a run for" in capsys.readouterr().out.splitlines()[-1]


def test_the_run_of_another_process_is_named_within_a_second(tmp_path):
    folder = prepared(tmp_path, "theirs")
    (folder / LOG).write_text(BAR)
    said: list[str] = []
    progress = Progress({folder: "theirs"}, said.append)
    began, named = time.monotonic(), []
    lock = _locked(folder)
    lock.__enter__()

    def report(event: Event) -> None:
        progress.report(event)
        if len(said) == 1:
            named.append(time.monotonic() - began)
            assert "in another process: theirs (Scoring under edits: 96 of 256" in progress.summary()
            lock.__exit__(None, None, None)

    class Executor:
        slots = 1

        def submit(self, folder: Path) -> Future[RunOutcome]:
            future: Future[RunOutcome] = Future()
            future.set_result(RunOutcome("done", 1.0))
            return future

        def stop(self) -> None: ...

        def close(self) -> None: ...

    def tick() -> None:
        assert named or time.monotonic() - began < 20, "the run of another process was not named"

    outcomes = run_all({folder: ["bake_es"]}, Executor(), retry=False, report=report, tick=tick)
    assert said[0] == "another process executes theirs (Scoring under edits: 96 of 256, 00:16 left)"
    assert named[0] < 1 and outcomes[folder].state == "done" and not progress.elsewhere
