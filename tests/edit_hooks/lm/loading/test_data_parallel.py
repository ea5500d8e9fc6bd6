"""Data parallelism without processes: gathered results, ranks, and the check that all ranks made the same edits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from edit_hooks.lm.loading.data_parallel import DataParallelMixin, in_document_order
from edit_hooks.utils.errors import EditingError


def test_results_are_merged_in_document_order() -> None:
    metrics = [{"task": {("acc", "none"): [0, 2, 4]}}, {"task": {("acc", "none"): [1, 3]}}, {"task": {}}]
    merged = in_document_order(metrics)
    assert merged[0] == {"task": {("acc", "none"): [0, 1, 2, 3, 4]}}
    assert merged[1:] == [{"task": {("acc", "none"): []}}] * 2
    samples = [[("a", 0), ("a", 2), ("b", 0), ("b", 2)], [("a", 1), ("b", 1)]]
    ranks = [{"task": [{"filter": name, "doc_id": doc} for name, doc in part]} for part in samples]
    documents = [(sample["filter"], sample["doc_id"]) for sample in in_document_order(ranks)[0]["task"]]
    assert documents == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


def test_other_objects_are_gathered_unchanged() -> None:
    assert in_document_order(["one", "two"]) == ["one", "two"]


def test_ranks_count_over_all_machines_and_do_not_communicate() -> None:
    """The fourth process of eight, the second on its machine; real communication would fail."""
    rank = DataParallelMixin()
    rank.accelerator = SimpleNamespace(num_processes=8, process_index=3, local_process_index=1)
    rank._rank, rank._world_size = 1, 1
    rank.join_processes()
    assert (rank._rank, rank._world_size) == (3, 8)
    assert (
        rank.all_gather(torch.tensor(5)).tolist() == [5] * 8 and rank.all_gather(torch.tensor([2])).tolist() == [2] * 8
    )
    assert rank.barrier() is None


def test_different_streams_on_different_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = DataParallelMixin()
    rank._rank, rank._world_size = 0, 2
    monkeypatch.setattr(rank, "_gathered", lambda obj, dst: [obj, "other"] if obj == "mine" else [obj, obj], False)
    monkeypatch.setattr(rank, "stream_state", lambda: "mine")
    with pytest.raises(EditingError, match="different weights"):
        rank.gather_object({})
    monkeypatch.setattr(rank, "stream_state", lambda: None)
    assert rank.gather_object({"task": []}) == [{"task": []}, {"task": []}]
