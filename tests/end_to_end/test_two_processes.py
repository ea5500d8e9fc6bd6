"""Two processes of the real command give what one process gives: single edits, a stream, more ranks than documents."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from paths import RECORDS, ROOT
from saved_results import differences, evaluate_here, read_results
from tiny import save_tiny

import lm_eval_tasks
from edit_hooks.lm.data_parallel import DataParallelMixin, in_document_order
from edit_hooks.utils.errors import EditingError

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
    "empty_rank": Run(1, f"{STREAM},num_edits=3,checkpoints=1;2"),  # rank 1 has none and makes no stream
    "same_stream": Run(4, f"{STREAM},retention=true"),  # both make it at the same time, in one store
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
    """The real command; returns the results and what went to the terminal."""
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
        pytest.skip(f"processes cannot meet on this machine: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return read_results(folder), done.stderr


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.parametrize("name", ["single", "empty_rank", pytest.param("same_stream", marks=pytest.mark.slow)], ids=str)
def test_two_processes_give_the_results_of_one(settings, name):
    one = one_process(settings, name)
    two, log = two_processes(settings, name)
    assert two["config"]["edited_hf"]["num_processes"] == 2 and one["config"]["edited_hf"]["num_processes"] == 1
    for part in ("results", "counts", "samples"):
        assert not differences(one[part], two[part], TOLERANCE)[:5]
    if name == "single":  # the bar of rank 0 and its two edits, none of rank 1
        assert set(re.findall(r"Editing with r_rome: 100%[^/]*?(\d+)/", log)) == {"2"}
    assert not list(settings[0].rglob(".*.tmp"))


def test_results_are_merged_in_document_order():
    metrics = [{"task": {("acc", "none"): [0, 2, 4]}}, {"task": {("acc", "none"): [1, 3]}}, {"task": {}}]
    merged = in_document_order(metrics)
    assert merged[0] == {"task": {("acc", "none"): [0, 1, 2, 3, 4]}}
    assert merged[1:] == [{"task": {("acc", "none"): []}}] * 2
    samples = [[("a", 0), ("a", 2), ("b", 0), ("b", 2)], [("a", 1), ("b", 1)]]
    ranks = [{"task": [{"filter": name, "doc_id": doc} for name, doc in part]} for part in samples]
    found = [(sample["filter"], sample["doc_id"]) for sample in in_document_order(ranks)[0]["task"]]
    assert found == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


def test_other_objects_are_gathered_as_they_are():
    assert in_document_order(["one", "two"]) == ["one", "two"]


def test_ranks_count_over_all_machines_and_never_wait_for_each_other():
    """The fourth process of eight, the second on its machine; any real communication would fail here."""
    rank = DataParallelMixin()
    rank.accelerator = SimpleNamespace(num_processes=8, process_index=3, local_process_index=1)
    rank._rank, rank._world_size = 1, 1
    rank.join_processes()
    assert (rank._rank, rank._world_size) == (3, 8)
    assert (
        rank.all_gather(torch.tensor(5)).tolist() == [5] * 8 and rank.all_gather(torch.tensor([2])).tolist() == [2] * 8
    )
    assert rank.barrier() is None


def test_different_streams_on_different_ranks_are_an_error(monkeypatch):
    rank = DataParallelMixin()
    rank._rank, rank._world_size = 0, 2
    monkeypatch.setattr(rank, "_gathered", lambda obj, dst: [obj, "other"] if obj == "mine" else [obj, obj], False)
    monkeypatch.setattr(rank, "stream_state", lambda: "mine")
    with pytest.raises(EditingError, match="different weights"):
        rank.gather_object({})
    monkeypatch.setattr(rank, "stream_state", lambda: None)
    assert rank.gather_object({"task": []}) == [{"task": []}, {"task": []}]
