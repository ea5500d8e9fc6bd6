"""Two processes of the real command give the results of one: single edits, a stream, more ranks than documents.

The commands run one after another in one pair of processes, which takes most of its time to start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
from typing import NamedTuple

import pytest
from lm_eval_without_its_tasks import SEPARATOR
from lm_runs import SHORT
from ordinary_tasks import write_tasks
from paths import HELPERS, RECORDS, ROOT
from saved_results import differences, evaluate_here, read_results
from warm_python import run_warm

from edit_hooks.contract.tiny_models import save_tiny

BAKE = RECORDS / "bake_qa.jsonl"
# Rows of other cases share a batch: another number of ranks means other batches, which moves float32 sums a little.
TOLERANCE = 1e-5


COMMAND = str(HELPERS / "lm_eval_without_its_tasks.py")


class Run(NamedTuple):
    limit: int
    arguments: str = ""
    tasks: tuple[str, ...] = ("bake_ls", "bake_s")


STREAM = f",mode=sequential,edits=bake,data={BAKE}"
RUNS = {
    "single": Run(3),  # rank 0 has two documents, rank 1 has one
    "empty_rank": Run(1, f"{STREAM},num_edits=3,checkpoints=1;2"),  # rank 1 has none and makes no edits
    # tasks of lm-eval's own kind on both models, one of them with drawn examples, beside one of ours
    "compared": Run(
        3,
        f"{STREAM},num_edits=2,edit_batch_size=2,compare_unedited=true,editor=ft_m",
        ("tiny_other_choice", "tiny_choice", "bake_ls"),
    ),
    "same_stream": Run(4, f"{STREAM},retention=true"),  # both ranks make it at once, with one store
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    (root / "fast.yaml").write_text('num_steps: 4\ncontext_templates: ["{}", "Then they said. {}"]\n')
    (root / "strong.yaml").write_text("layers: [1]\nnum_steps: 10\nlr: 0.1\n")
    (root / "tasks").mkdir()
    write_tasks(root / "tasks")
    return root, save_tiny(root, "llama")


def folder_and_arguments(settings, name, processes):
    root, model = settings
    folder = root / f"{name}-{processes}"
    file = "strong.yaml" if name == "compared" else "fast.yaml"
    common = f"pretrained={model},editor_args={root / file},store={folder}-store"
    return folder, common + RUNS[name].arguments


def one_process(settings, name):
    folder, arguments = folder_and_arguments(settings, name, 1)
    chosen = RUNS[name]
    options = {"limit": chosen.limit, "bootstrap_iters": 100_000}  # as the command has it: tasks of lm-eval need some
    evaluate_here(folder, arguments, list(chosen.tasks), BAKE, settings[0] / "tasks", **options)
    return read_results(folder)


def two_processes(settings, names):
    """Run the real command for each name; return the results and the log of each."""
    folders, words = [], []
    for name in names:
        folder, arguments = folder_and_arguments(settings, name, 2)
        folders.append(folder)
        words += [
            *["then", "--model", "edited_hf", "--model_args", arguments, "--tasks", ",".join(RUNS[name].tasks)],
            *["--limit", str(RUNS[name].limit), "--device", "cpu", "--log_samples", "--output_path", str(folder)],
            *["--include_path", str(settings[0] / "tasks"), "--metadata", f"data={BAKE}"],
            *["--gen_kwargs", ",".join(f"{key}={value}" for key, value in SHORT.items())],
        ]
    command = [
        *["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
        *["--main_process_port", _free_port(), COMMAND, *words],
    ]
    done = run_warm(command, env=environment(), cwd=settings[0])
    failed = "" if done.returncode == 0 else done.stderr[-3000:] or f"no output; exit code {done.returncode}"
    if failed and (obstacle := why_ranks_cannot_connect()):
        pytest.skip(f"processes cannot connect on this machine: {obstacle}")
    assert not failed, failed
    _, *logs = done.stderr.split(SEPARATOR)
    return {name: (read_results(folder), log) for name, folder, log in zip(names, folders, logs, strict=True)}


def environment():
    """Of the ranks: one thread each, no accelerator, our packages."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


# As the ranks above connect, without anything of ours.
PROBE = """
import datetime, torch
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total == 2
"""


def why_ranks_cannot_connect():
    """The end of the log of two ranks that add two numbers, or None if they can."""
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROBE]
    with contextlib.ExitStack() as scope:
        pair = []
        for rank in "01":
            options = {"env": {**environment(), **ranks, "RANK": rank}, "stderr": subprocess.PIPE, "text": True}
            pair.append(scope.enter_context(subprocess.Popen(command, **options)))
            scope.callback(pair[-1].kill)
        try:
            logs = [process.communicate(timeout=120)[1] for process in pair]
        except subprocess.TimeoutExpired:
            return "no connection within two minutes"
    return None if not any(process.returncode for process in pair) else "\n".join(logs)[-1000:]


TOGETHER = ("single", "empty_rank", "compared")


@pytest.fixture(scope="module")
def launched(settings):
    """`launched(names)`: results and logs of two processes that run these commands; made once.

    A command that fails fails its tests, whatever its log has: a rank that crashes breaks the other's connection.
    """
    return functools.cache(functools.partial(two_processes, settings))


@pytest.mark.parametrize("name", [*TOGETHER, pytest.param("same_stream", marks=pytest.mark.slow)], ids=str)
def test_two_processes_give_the_results_of_one(settings, launched, name):
    one = one_process(settings, name)
    two, log = launched(TOGETHER if name in TOGETHER else (name,))[name]
    assert two["config"]["edited_hf"]["num_processes"] == 2 and one["config"]["edited_hf"]["num_processes"] == 1
    for part in ("results", "counts", "samples"):
        assert not differences(one[part], two[part], TOLERANCE)[:5]
    if name == "compared":
        columns = two["results"]["tiny_other_choice"]
        assert columns["acc@difference,none"] == columns["acc,none"] - columns["acc@unedited,none"]
        assert len(two["samples"]["tiny_other_choice"]) == 3 and "acc@unedited,none" not in two["results"]["bake_ls"]
    if name == "single":  # the progress bar of rank 0 with its two edits, none of rank 1
        assert set(re.findall(r"Editing with r_rome: 100%[^/]*?(\d+)/", log)) == {"2"}
    assert not list(settings[0].rglob(".*.tmp"))
