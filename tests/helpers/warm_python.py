"""Fresh Python processes that find the libraries already imported: forks of one process that holds nothing of ours.

Importing torch and transformers takes three seconds of a command's four. One process per worker imports them once; each
call runs in a fork of it, with its own arguments, environment, folder and import path. What an interpreter reads at its
start alone (``-X``, ``.pth`` files) is that of the first process: tests of these start another. Its hash seed, on which
the order of sets depends, is HASH_SEED, and random in the processes of pytest.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARIES = (
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.conversion_mapping",
    "transformers.integrations.finegrained_fp8",
    "accelerate",
    "datasets",
    "scipy.stats",
)
TIMEOUT_S = 300
HASH_SEED = "1"


def run_warm(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words (``-m MODULE ...`` or ``-c CODE ...``); as ``subprocess.run``, output captured.

    Without fork (Windows) it is that.
    """
    command, environ = [sys.executable, *words], dict(os.environ if env is None else env)
    if not hasattr(os, "fork"):
        return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cwd, timeout=TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        printed = {name: str(Path(folder, name)) for name in ("stdout", "stderr")}
        request = {"words": list(words), "env": environ, "cwd": str(cwd), **printed}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            _server.cache_clear()
            raise RuntimeError(f"the process that is forked for {command} has ended with {server.wait()}")
        out, err = (Path(path).read_text(encoding="utf-8", errors="replace") for path in printed.values())
    return subprocess.CompletedProcess(command, json.loads(answer), out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that is forked; it ends when this process does, at the end of its input."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTHONHASHSEED"] = HASH_SEED
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def _serve() -> None:
    """Answer each request with the exit status of a fork that ran it."""
    del sys.path[0]  # the folder of this file
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(request: dict[str, object]) -> None:
    """Become the requested process, for TIMEOUT_S at most; does not return."""
    signal.alarm(TIMEOUT_S)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(str(request[name]), os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(str(request["cwd"]))
    environ, words = request["env"], request["words"]
    assert isinstance(environ, dict) and isinstance(words, list)
    os.environ.clear()
    os.environ.update(environ)
    option, target, *arguments = words
    search = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [os.getcwd(), *search]
    status = 0
    try:
        if option == "-m":
            sys.argv = [target, *arguments]
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            assert option == "-c", option
            script = Path(str(request["stdout"])).with_name("command.py")
            script.write_text(target, encoding="utf-8")
            sys.argv = [option, *arguments]
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
