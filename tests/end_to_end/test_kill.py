"""Runs killed at any moment go on where they stopped and end with the results of a run that was left alone.

Each run is a process of its own, forked from one that has imported everything: killing is real, waiting is short.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from paths import HELPERS, RECORDS, ROOT
from saved_results import differences, read_results

from edit_hooks.contract.tiny_models import save_tiny

BAKE = RECORDS / "bake_qa.jsonl"
NUM_KILLS = 2  # of each kind of run: at a number of files, and at a time
NUM_CASES = 40  # more than a run makes between two polls of the store
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Forge:
    """Starts evaluations as processes: a parent imports lm-eval once and forks one child per order."""

    def __init__(self, log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), str(ROOT)])
        command = [sys.executable, __file__]
        self.log = log
        self.parent = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )

    def start(self, folder: Path, model_args: str) -> int:
        """Begin a run; returns its process id."""
        order = {"folder": str(folder), "model_args": model_args, "tasks": ["bake_ls"], "data": str(folder.parent)}
        order["data"] = str(next(folder.parent.glob("*.jsonl")))
        self.parent.stdin.write(json.dumps(order) + "\n")
        self.parent.stdin.flush()
        return int(self.parent.stdout.readline())

    def ended(self) -> int:
        """Wait for the run; returns its exit code, negative for a signal."""
        return int(self.parent.stdout.readline())

    def finish(self, folder: Path, model_args: str) -> dict:
        """Run to the end without a kill."""
        self.start(folder, model_args)
        assert self.ended() == 0, self.log.read_text()[-3000:]
        return read_results(folder)

    def close(self) -> None:
        self.parent.stdin.close()
        self.parent.wait(timeout=30)


def serve() -> None:
    """Loop of the parent: fork a child per line, print its process id, then its exit status."""
    import lm_eval.evaluator
    from saved_results import evaluate_here

    from edit_hooks.base.registry import editor_class
    from edit_hooks.lm.asking.stored_answers import ANSWERING_MODULES
    from edit_hooks.utils.storage.hashing import code_fingerprint

    # Cached for all children, so that a source file that changes during the test does not change the keys.
    code_fingerprint(editor_class("r_rome").__module__)
    code_fingerprint(*ANSWERING_MODULES)
    lm_eval.evaluator.add_env_info = lambda storage: None  # a dozen programs describe the machine after every run
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        # lm-eval imports as it goes: a run without edits leaves nothing to import after the fork.
        model = save_tiny(Path(folder), "llama")
        evaluate_here(Path(folder) / "out", f"pretrained={model},mode=none", ["bake_ls"], BAKE, limit=1)

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            code = 1
            try:
                evaluate_here(Path(order.pop("folder")), data=Path(order.pop("data")), **order)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    forge = Forge(tmp_path_factory.mktemp("forge") / "log.txt")
    yield forge
    forge.close()


@pytest.fixture(scope="module")
def root_and_arguments(tmp_path_factory):
    """A folder with a tiny model, settings and more cases than one batch of edits."""
    root = tmp_path_factory.mktemp("kill")
    model = save_tiny(root, "llama")
    (root / "fast.yaml").write_text('num_steps: 2\ncontext_templates: ["{}"]\n')
    records = [json.loads(line) for line in BAKE.read_text(encoding="utf-8").splitlines()]
    with (root / "cases.jsonl").open("w", encoding="utf-8") as file:
        for number in range(NUM_CASES):
            record = json.loads(json.dumps(records[number % len(records)]))
            record["case_id"] = number
            for field, text in (("target_new", "Dravonia"), ("target_true", "Veldt")):
                record["requested_rewrite"][field]["str"] = f"{text} {number}"
            file.write(json.dumps(record) + "\n")
    return root, f"pretrained={model},editor_args={root / 'fast.yaml'},store="


def finished(store: Path) -> dict[str, int]:
    """Inodes of finished edits; an edit that is computed again is another file of the same name."""
    return {path.name: path.stat().st_ino for path in store.glob("deltas/*/*.safetensors")}


def everything(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


KINDS = {
    "single": "",
    "sequential": ",mode=sequential,edits=bake,num_edits=12,checkpoints=4;8,immediate=false,data={data}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_resume_and_end_with_the_same_results(forge, root_and_arguments, kind):
    root, common = root_and_arguments
    arguments = KINDS[kind].format(data=root / "cases.jsonl")
    began = time.perf_counter()
    full_store = root / f"{kind}-uninterrupted-store"
    uninterrupted = forge.finish(root / f"{kind}-uninterrupted", f"{common}{full_store}{arguments}")
    length = time.perf_counter() - began
    all_files = len(everything(full_store))
    dice = random.Random(7)
    with_edits = interrupted = 0
    for number in range(NUM_KILLS):
        store = root / f"{kind}-{number}-store"
        # Half of the kills at a random time, half at a random number of files in the store.
        moment = dice.uniform(0.2, 1.0) * length if number % 2 else 10 * length
        enough = dice.randint(1, all_files) if number % 2 == 0 else all_files + 1
        killed = root / f"{kind}-{number}-killed"
        interrupted += kill(forge, killed, f"{common}{store}{arguments}", store, moment, enough)
        before = finished(store)
        resumed = forge.finish(root / f"{kind}-{number}", f"{common}{store}{arguments}")
        for part in ("results", "counts", "samples"):
            assert not differences(uninterrupted[part], resumed[part])[:5], f"kill {number} after {len(before)} edits"
        after = finished(store)
        assert {name: after.get(name) for name in before} == before, "a finished edit was computed again"
        assert len(after) == len(finished(full_store))
        assert not [path for path in store.rglob("*") if path.name.endswith(".tmp")]
        with_edits += bool(before)
    assert interrupted >= NUM_KILLS // 2 and with_edits, (interrupted, with_edits)


def kill(forge, folder, model_args, store, moment, enough):
    """Kill a run after ``moment`` seconds or at ``enough`` files in the store; return whether it was running."""
    began = time.perf_counter()
    process = forge.start(folder, model_args)
    while time.perf_counter() - began < moment and len(everything(store)) < enough:
        time.sleep(0.001)
        if not Path(f"/proc/{process}/stat").exists() and Path("/proc").exists():
            break  # the process has ended
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    return forge.ended() == -signal.SIGKILL


if __name__ == "__main__":
    serve()
