"""A process that executes one run after another and keeps the model between them.

Most of a short run is its start: imports, the model, and lm-eval's description of the machine, for which it starts a
dozen programs. Here they are made once.
A run still is the command ``lm_eval`` with its arguments, log and lock. The process ends after a run that failed or was
stopped, and the next run starts another one.

Messages are one JSON line each; the descriptors of log and lock come with the request.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_MESSAGE = 1 << 20  # bytes of a request: a command with its settings
GONE = -9  # exit code of a run whose process has ended without an answer


class KeptProcess:
    """Starts runs in one process with fixed variables, which is replaced when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._run: KeptRun | None = None

    def start(self, command: list[str], log: Path, environment: Mapping[str, str], lock: int) -> KeptRun:
        """Begin a run, as :func:`lm_edit.sweeps.execution.runs.start_process`.

        Args:
            command: ``python -m MODULE ...``.
        """
        if self._process is None or self._process.poll() is not None or (self._run is not None and self._run.poll()):
            self._begin(environment)
        assert self._process is not None and self._channel is not None
        interpreter, option, *words = command
        assert (interpreter, option) == (sys.executable, "-m"), command
        with log.open("wb") as output:
            request = json.dumps({"words": words}).encode()
            self._channel.settimeout(None)  # whole, however long it is; asking for the end does not wait
            socket.send_fds(self._channel, [len(request).to_bytes(4, "big") + request], [output.fileno(), lock])
        self._run = KeptRun(self._process, self._channel)
        return self._run

    def _begin(self, environment: Mapping[str, str]) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = ours

    def close(self) -> None:
        """End the process, which executes no run."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._channel = self._run = None


class KeptRun:
    """One run of a :class:`KeptProcess`; signals to its process group end both."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self.pid = process.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code of the run, ``None`` while it is executed."""
        if self._code is None:
            self._channel.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                answer = self._channel.recv(64)
                self._code = int(answer) if answer else GONE
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, which a signal has ended.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        return self._process.wait(timeout)


def _serve(channel: socket.socket) -> None:
    """Execute the runs that are requested, until one fails or no more can come."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 2)
        if not data:
            return
        size = int.from_bytes(data[:4], "big")
        while len(data) < 4 + size:
            if not (more := channel.recv(MAX_MESSAGE)):
                return
            data += more
        with _as_own_process(*descriptors):
            code = _run(json.loads(data[4:])["words"])
        gc.collect()
        channel.sendall(str(code).encode())
        if code:
            return


def _run(words: list[str]) -> int:
    """Exit code of a module run with arguments."""
    sys.argv = list(words)
    try:
        if words[0] == "lm_eval":
            _keep_what_runs_share()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


@contextlib.contextmanager
def _as_own_process(log: int, lock: int) -> Iterator[None]:
    """Print into the log of a run, and hold its lock for as long; variables and folder are as before afterwards."""
    environment, folder = dict(os.environ), Path.cwd()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with open(os.devnull, "wb") as nowhere:
            for descriptor in (1, 2):
                os.dup2(nowhere.fileno(), descriptor)
        os.close(lock)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


@functools.cache
def _keep_what_runs_share() -> None:
    """Keep the model from now on, the description of the machine, and the index of lm-eval's own task files.

    Those of other folders are read at every run, since they may change.
    """
    from lm_eval import evaluator
    from lm_eval.tasks import manager

    from edit_hooks.lm.loading.checkpoint import KEPT

    KEPT.start()
    describe = evaluator.add_env_info

    @functools.cache
    def described() -> dict[str, Any]:
        facts: dict[str, Any] = {}
        describe(facts)
        return facts

    evaluator.add_env_info = lambda results: results.update(described())
    own, original = Path(manager.__file__).parent, manager.TaskIndex.build

    @functools.cache
    def kept() -> dict[str, Any]:
        return dict(original([own]))

    def build(paths: Sequence[Path], **options: Any) -> dict[str, Any]:
        if options or not paths or paths[0] != own:
            return dict(original(paths, **options))
        return {**kept(), **original(paths[1:])}

    manager.TaskIndex.build = staticmethod(build)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored by what a shell started in the background
    _serve(socket.socket(fileno=int(sys.argv[1])))
