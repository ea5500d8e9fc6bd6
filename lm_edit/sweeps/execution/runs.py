"""One run of a sweep in its folder: command, lock, attempt, result.

A run's folder has ``run.json`` (its settings), ``log.txt`` (output of ``lm_eval``), ``attempt/`` (files of a run
that is not finished) and ``results/``, the renamed attempt: results are there completely or not at all. Results that
lost a part later, as on a full disk or in an incomplete copy, are damaged: they do not count, and are set aside before
the run is executed again. After a failure there is ``failed.json``.

The lock is a file lock on ``lock``, which the process of ``lm_eval`` inherits. It is held as long as that process is
there, also when the sweep itself was killed, and no run is executed twice at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import remove_leftovers, set_aside, write_atomically
from edit_hooks.utils.storage.json_io import json_text, read_json
from lm_edit.results.filters import LABELS
from lm_edit.sweeps.execution.complete import missing_parts
from lm_edit.sweeps.planning.grid import Run

State = Literal["done", "damaged", "failed", "running", "interrupted", "waiting"]

SETTINGS, LOG, LOCK, ATTEMPT, RESULTS, FAILED = "run.json", "log.txt", "lock", "attempt", "results", "failed.json"
TAIL_LINES = 12  # of the log of a failed run
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # between the signals that end a run
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RunStatus(NamedTuple):
    """The state of a run by its files, and the reason if it is ``failed`` or ``damaged``."""

    state: State
    reason: str = ""


class RunOutcome(NamedTuple):
    """How an execution ended; plain values, which executors send between processes.

    Attributes:
        state: ``busy``: another process holds the lock. ``damaged``: there are results, and parts of them are missing.
        seconds: of this execution; 0 if the results were there.
        reason: why it failed, with the last lines of the log; or the part that damaged results lack.
    """

    state: Literal["done", "damaged", "failed", "busy", "interrupted"]
    seconds: float = 0.0
    reason: str = ""


def prepare(out: Path, run: Run) -> Path:
    """Make the folder of a run with its settings; return it.

    Settings that are there and differ, as after a full disk, are replaced: the plan has all of them.
    """
    folder = out / run.folder_name
    settings = folder / SETTINGS
    content = {"name": run.name, **run.labels, **run.content, "tasks": list(run.tasks)}
    text = json_text(content, indent=1) + "\n"
    if settings.is_dir():
        set_aside(settings)
    if not settings.is_file() or settings.read_bytes() != text.encode():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(settings, text)
    return folder


def state_of(folder: Path, tasks: Sequence[str]) -> RunStatus:
    """The state of a run by its files.

    Reads the samples of a finished run, to check them: call it once per run, not in a loop that polls.

    Args:
        tasks: of the run; by the plan, since ``run.json`` may be damaged.
    """
    if os.path.lexists(folder / RESULTS):
        lacking = missing_parts(folder / RESULTS, tasks)
        return RunStatus("done") if lacking is None else RunStatus("damaged", lacking)
    if is_locked(folder):
        return RunStatus("running")
    if (folder / FAILED).is_file():
        return RunStatus("failed", failure_of(folder))
    return RunStatus("interrupted" if (folder / ATTEMPT).is_dir() else "waiting")


def set_aside_damaged(folder: Path, tasks: Sequence[str]) -> None:
    """Rename damaged results, so that the run can be executed again; nothing is deleted.

    Does nothing while another process executes the run, or if one has executed it since the damage was found.
    """
    with _locked(folder) as lock:
        if lock is not None and state_of(folder, tasks).state == "damaged":
            set_aside(folder / RESULTS)


def failure_of(folder: Path) -> str:
    """The reason of a failed run; "" if there is none."""
    with contextlib.suppress(EditingError, KeyError, TypeError):
        return str(read_json(folder / FAILED)["reason"])
    return ""


class Running(Protocol):
    """A process that executes a run and leads a process group; a :class:`subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def execute(
    folder: str,
    environment: Mapping[str, str],
    stopped: Callable[[], bool] = lambda: False,
    start: Callable[[list[str], Path, Mapping[str, str], int], Running] | None = None,
) -> RunOutcome:
    """Execute the run of a folder, unless there are results or another process does.

    Args:
        environment: variables on top of those of this process.
        stopped: whether to end the run; polled while it runs.
        start: starts a command with its log, variables and lock; by default :func:`start_process`.
    """
    place = Path(folder)
    with _locked(place) as lock:
        if lock is None:
            return RunOutcome("busy")
        settings = read_json(place / SETTINGS, "run of a sweep")
        if os.path.lexists(place / RESULTS):
            lacking = missing_parts(place / RESULTS, settings["tasks"])
            return RunOutcome("done") if lacking is None else RunOutcome("damaged", 0.0, lacking)
        if _finish(place, settings) is None:
            return RunOutcome("done")
        shutil.rmtree(place / ATTEMPT, ignore_errors=True)
        (place / FAILED).unlink(missing_ok=True)
        remove_leftovers(place)
        (place / ATTEMPT).mkdir()
        began = time.monotonic()
        process = (start or start_process)(command_of(settings, place / ATTEMPT), place / LOG, environment, lock)
        code = _wait(process, stopped)
        seconds = time.monotonic() - began
        if code is None:
            return RunOutcome("interrupted", seconds)
        reason = f"lm_eval ended with exit code {code}" if code else _finish(place, settings)
        if reason is None:
            return RunOutcome("done", seconds)
        return _fail(place, seconds, reason)


def command_of(settings: Mapping[str, Any], output: Path) -> list[str]:
    """The command of a run: ``python -m lm_eval run`` with its settings."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "edited_hf"]
    labels = {name: settings[name] for name in LABELS.values() if name in settings}
    command += ["--tasks", ",".join(settings["tasks"]), "--model_args", json.dumps(settings["model_args"] | labels)]
    if settings["metadata"]:
        command += ["--metadata", json.dumps(settings["metadata"])]
    if settings["limit"] is not None:
        command += ["--limit", str(settings["limit"])]
    for name, value in settings["lm_eval"].items():
        if value is not False:
            text = [] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)]
            command += [f"--{name}", *text]
    return [*command, "--output_path", str(output), "--log_samples"]


def thread_variables(num_threads: int) -> dict[str, str]:
    """Variables that limit a run to some threads; those that the user has set are kept."""
    return {name: str(num_threads) for name in THREAD_VARIABLES if name not in os.environ}


def is_locked(folder: Path) -> bool:
    """Whether a process executes the run of a folder."""
    if not (folder / LOCK).is_file():
        return False
    with _locked(folder) as lock:
        return lock is None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """The file descriptor of the lock; ``None`` if another process holds it."""
    try:
        import fcntl
    except ImportError:
        raise EditingError("sweeps need the file locks of a POSIX system; use Linux, macOS or WSL.") from None
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        except OSError as error:
            raise EditingError(
                f"{folder}: the file system has no locks that work ({error.strerror}), and without them two sweeps "
                "would execute one run; give another --out."
            ) from None
        else:
            yield lock
    finally:
        os.close(lock)  # a process that inherited it keeps the lock


def start_process(command: list[str], log: Path, environment: Mapping[str, str], lock: int) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own that inherits the lock.

    Ctrl-C in a terminal reaches the sweep alone, which then ends its runs.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=(lock,),
            start_new_session=True,
        )


def _wait(process: Running, stopped: Callable[[], bool]) -> int | None:
    """Exit code of a process; ``None`` if it was stopped."""
    try:
        while (code := process.poll()) is None:
            if stopped():
                _end(process)
                return None
            time.sleep(POLL_SECONDS)
    except BaseException:
        _end(process)
        raise
    return code


def _end(process: Running) -> None:
    """End a process and its own children: interrupt, terminate, kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it


def _finish(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Rename a complete attempt; return the parts that an incomplete one lacks."""
    attempt = folder / ATTEMPT
    lacking = missing_parts(attempt, settings["tasks"]) if attempt.is_dir() else "there is no attempt"
    if lacking is None:
        os.replace(attempt, folder / RESULTS)
        (folder / FAILED).unlink(missing_ok=True)
    return lacking


def _fail(folder: Path, seconds: float, reason: str) -> RunOutcome:
    tail = log_tail(folder)
    content = {"reason": reason, "log": tail, "seconds": round(seconds, 1), "date": _now()}
    write_atomically(folder / FAILED, json_text(content, indent=1) + "\n")
    return RunOutcome("failed", seconds, "\n".join([reason, *(f"  | {line}" for line in tail)]))


def log_tail(folder: Path) -> list[str]:
    """The last lines of a run's log; of a progress bar, its last state."""
    try:
        with (folder / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 100_000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in lines if line][-TAIL_LINES:]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
