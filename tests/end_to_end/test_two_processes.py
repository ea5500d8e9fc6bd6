"""Two processes of the real command give the results of one: single edits, a stream, more ranks than documents."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import RECORDS, ROOT
from saved_results import differences, evaluate_here, read_results

import lm_eval_tasks
from edit_hooks.contract.tiny_models import save_tiny

BAKE = RECORDS / "bake_qa.jsonl"
# Rows of other cases share a batch: another number of ranks means other batches, which moves float32 sums a little.
TOLERANCE = 1e-5
TASKS = ["bake_ls", "bake_s"]


class Run(NamedTuple):
    limit: int
    arguments: str = ""


STREAM = f",mode=sequential,edits=bake,data={BAKE}"
RUNS = {
    "single": Run(3),  # rank 0 has two documents, rank 1 has one
    "empty_rank": Run(1, f"{STREAM},num_edits=3,checkpoints=1;2"),  # rank 1 has none and makes no edits
    "same_stream": Run(4, f"{STREAM},retention=true"),  # both ranks make it at once, with one store
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    (root / "fast.yaml").write_text('num_steps: 4\ncontext_templates: ["{}", "Then they said. {}"]\n')
    return root, save_tiny(root, "llama")


def folder_and_arguments(settings, name, processes):
    root, model = settings
    folder = root / f"{name}-{processes}"
    common = f"pretrained={model},editor_args={root / 'fast.yaml'},store={folder}-store"
    return folder, common + RUNS[name].arguments


def one_process(settings, name):
    folder, arguments = folder_and_arguments(settings, name, 1)
    evaluate_here(folder, arguments, TASKS, BAKE, limit=RUNS[name].limit)
    return read_results(folder)


def two_processes(settings, name):
    """Run the real command; return the results and the log."""
    folder, arguments = folder_and_arguments(settings, name, 2)
    command = [
        *[sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
        *["--main_process_port", _free_port(), "-m", "lm_eval", "--model", "edited_hf", "--model_args", arguments],
        *["--tasks", ",".join(TASKS), "--limit", str(RUNS[name].limit), "--device", "cpu", "--log_samples"],
        *["--include_path", str(Path(lm_eval_tasks.__file__).parent), "--output_path", str(folder)],
        *["--metadata", f"data={BAKE}"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environment, cwd=settings[0], capture_output=True, text=True, timeout=300)
    if done.returncode and re.search(r"(?i)address|rendezvous|gloo", done.stderr) and "EditingError" not in done.stderr:
        pytest.skip(f"processes cannot connect on this machine: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return read_results(folder), done.stderr


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.parametrize("name", ["single", "empty_rank", pytest.param("same_stream", marks=pytest.mark.slow)], ids=str)
def test_two_processes_give_the_results_of_one(settings, name):
    one = one_process(settings, name)
    two, log = two_processes(settings, name)
    assert two["config"]["edited_hf"]["num_processes"] == 2 and one["config"]["edited_hf"]["num_processes"] == 1
    for part in ("results", "counts", "samples"):
        assert not differences(one[part], two[part], TOLERANCE)[:5]
    if name == "single":  # the progress bar of rank 0 with its two edits, none of rank 1
        assert set(re.findall(r"Editing with r_rome: 100%[^/]*?(\d+)/", log)) == {"2"}
    assert not list(settings[0].rglob(".*.tmp"))
