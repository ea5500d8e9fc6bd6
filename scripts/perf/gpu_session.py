"""One session on a GPU: the tests that need one, then the table of the page "How fast", in a number of minutes.

    python scripts/perf/gpu_session.py OUT --minutes 9

Runs from a clone, where torch, transformers, safetensors, PyYAML and pytest are installed. Nothing is downloaded, and
neither lm-eval nor an installation of the clone is needed. Into the folder OUT go

- ``environment.txt``: the card and the versions;
- ``tests.txt``: the output of the tests, file by file;
- ``table.json`` and ``table.md``: what was measured, and its Markdown for ``scripts/perf/README.md``.

Everything is saved as it ends, and the same command goes on behind it, also with the files of another machine. Another
card gets a table of its own, ``table-CARD.json``. ``--table "OPTIONS"`` replaces the options of ``engine.py --table``:
those of the published table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = "--shape llama-3-8b --dtype bfloat16 --device cuda --edits-from counterfact"
# Those of what never ran on a card come first.
TESTS = [
    f"tests/end_to_end/test_cuda_{name}.py" for name in ("recording", "decoding", "waiting_edits", "locate", "editors")
]
WITH_LM_EVAL = "tests/end_to_end/test_cuda_runs.py"
TEST_SHARE = 1 / 3  # of the time
LAST_SECONDS = 20  # in which a measurement under way may end
KILL_SECONDS = 10
CARD_LOST = 3  # exit status of engine.py
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "yaml")
CARD = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
MOST_STARTS = 8  # of the table: after an error of the card only another process can go on
VERSIONS = """
import importlib.metadata, platform
print("python", platform.python_version())
for name in ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "lm_eval", "peft"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
"""


def run(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run a command from the clone, its output appended to a file.

    Returns:
        Its exit status; ``None`` if it had to be stopped.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except FileNotFoundError as error:
            output.write(f"{error}\n")
            return 127
        try:
            return process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps even killed processes
                    process.wait(timeout=KILL_SECONDS)


def write_metadata(folder: Path) -> None:
    """Write what an installation of the clone says of it: its entry points, by which benchmarks are found."""
    text = (ROOT / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:\w+ = ".+"\n)+)', text, re.MULTILINE)
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    info = folder / f"lm_eval_editing-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lm-eval-editing\nVersion: {version}\n")
    lines = [f"[{group}]\n{entries}" for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines).replace('"', ""))


def write_environment(out: Path) -> None:
    log = out / "environment.txt"
    log.unlink(missing_ok=True)
    for command in (["nvidia-smi"], ["git", "rev-parse", "HEAD"], [sys.executable, "-c", VERSIONS]):
        run(command, log, 30)


def run_tests(out: Path, until: float) -> None:
    """Run the files of tests that no earlier call has run to their end."""
    log = out / "tests.txt"
    if importlib.util.find_spec("pytest") is None:
        print("no tests: pytest is not installed", flush=True)
        return
    files = [*TESTS, *([WITH_LM_EVAL] if importlib.util.find_spec("lm_eval") else [])]
    # with -v a test that is stopped has a line, and so have those before it
    options = ["-v", "--noconftest", "--tb=short", "--durations=5", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # tiny models leave a card idle
        options += ["-n", str(min(8, os.cpu_count() or 1))]
    for file in files:
        ended = f"== {file} ended with"
        if log.is_file() and ended in log.read_text():
            continue
        status = run([sys.executable, "-m", "pytest", *options, file], log, until - time.monotonic())
        with log.open("a") as output:
            output.write(f"== {file} was stopped\n" if status is None else f"{ended} {status}\n")
        print(f"{file}: {'stopped, out of time' if status is None else f'exit status {status}'}", flush=True)
        if status is None:
            return


def table_file(out: Path) -> Path:
    """Where the table of this machine's card is saved: beside one of another card, whose numbers it does not mix."""
    found = subprocess.run([sys.executable, "-c", CARD], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    own, path = re.sub(r"\W+", "-", found).lower(), out / "table.json"
    if not own or not path.is_file() or json.loads(path.read_text())["about"]["device"] == found:
        return path
    return out / f"table-{own}.json"


def measure_table(out: Path, until: float, options: Sequence[str]) -> None:
    """Measure what is open, in another process after one that was lost."""
    table = table_file(out)
    for _ in range(MOST_STARTS):
        seconds = until - time.monotonic()
        minutes = (seconds - LAST_SECONDS) / 60
        if minutes <= 0:
            break
        saved = ["--save", str(table.resolve()), "--minutes", f"{minutes:.2f}"]
        command = [sys.executable, "scripts/perf/engine.py", "--table", *options, *saved]
        status = run(command, out / "table.log", seconds)
        print(f"the table: {'stopped, out of time' if status is None else f'exit status {status}'}", flush=True)
        if status is not None and 0 <= status != CARD_LOST:
            break
    if table.with_suffix(".md").is_file():
        print(table.with_suffix(".md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    parser.add_argument("--only", choices=("tests", "table"), help="one of the two")
    parser.add_argument("--table", default=PUBLISHED, metavar="OPTIONS", help="of engine.py --table, as one text")
    args = parser.parse_args()
    start = time.monotonic()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"nothing is measured: {', '.join(missing)} cannot be imported by {sys.executable}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            importlib.metadata.distribution("lm-eval-editing")
        except importlib.metadata.PackageNotFoundError:
            write_metadata(Path(folder))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        session(args, start)


def session(args: argparse.Namespace, start: float) -> None:
    write_environment(args.out)
    until = start + 60 * args.minutes
    if args.only != "table":
        run_tests(args.out, until if args.only else start + 60 * args.minutes * TEST_SHARE)
    if args.only != "tests":
        measure_table(args.out, until, shlex.split(args.table))


if __name__ == "__main__":
    main()
