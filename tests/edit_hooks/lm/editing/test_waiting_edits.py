"""Large edits: where they wait for their answers, how often they are copied, and disks that they do not fit on."""

from __future__ import annotations

import logging
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, instance
from pretended_device import move_model, pretended_device

from edit_hooks import EditRequest
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model, save_tiny
from edit_hooks.deltas import delta, placement
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.lm.editing import memory_limit
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.lm.editing.memory_limit import LargeEdits
from edit_hooks.modeling import memory
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.store import store as store_module
from edit_hooks.store.store import Description, Store

GPU = torch.device("cuda", 0)
NOWHERE = Description(what="edit", model={}, code="", inputs={})
Usage = namedtuple("Usage", "total used free")


class OnGPU(torch.Tensor):
    """A tensor that names a GPU as its device; its numbers are on the CPU."""

    @property
    def device(self) -> torch.device:
        return GPU

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def on_gpu(*shape: int) -> OnGPU:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).as_subclass(OnGPU)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free memory of the GPU, which copies leave as any other device's do."""
    left = {"bytes": 0}
    for module in (memory_limit, memory):
        monkeypatch.setattr(module, "free_cuda_bytes", lambda device: left["bytes"])
    monkeypatch.setattr(placement, "copied_to_host", lambda tensors: [tensor.cpu() for tensor in tensors])
    return left


def test_the_first_edits_wait_on_the_gpu(free: dict[str, int]) -> None:
    """In a quarter of what was free at the first one; steps of a stream, which later steps do not read, on the CPU."""
    edits = [Delta(dense={"weight": on_gpu(10, 10)}) for _ in range(4)]
    free["bytes"] = 4 * 1000
    large, stream = LargeEdits(None), LargeEdits(None, of_stream=True)
    kept = []
    for edit in edits:
        kept.append(large.kept(edit, NOWHERE))
        free["bytes"] = 10**9  # what is freed later does not count: answers need it
    assert [one is edit for one, edit in zip(kept, edits, strict=True)] == [True, True, False, False]
    assert {tensor.device for one in kept[2:] for tensor in placement.saved_tensors(one)} == {torch.device("cpu")}
    assert placement.saved_tensors(stream.kept(edits[0], NOWHERE))[0].device == torch.device("cpu")
    copy = placement.off_device(edits[3])
    assert large.kept(edits[3], NOWHERE, copy) is copy, "the copy that was stored is not made again"


def test_finished_copies_of_weights_stay_while_there_is_room(free: dict[str, int]) -> None:
    updates = {"weight": on_gpu(10, 10), "bias": on_gpu(10)}
    free["bytes"] = 8 * 440
    assert placement.parked(updates) == updates
    free["bytes"] -= 1
    assert {tensor.device for tensor in placement.parked(updates).values()} == {torch.device("cpu")}
    here = {"weight": torch.ones(3)}
    assert placement.parked(here)["weight"] is here["weight"]


def test_a_finished_edit_is_copied_without_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of minutes is not lost because the system has none left."""
    make = torch.empty_like

    def short(like: torch.Tensor, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return make(like, **more)

    monkeypatch.setattr(torch, "empty_like", short)
    assert placement._page_locked(torch.ones(2, 3)).shape == (2, 3)


def test_a_checksum_is_read_from_the_copy_once(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Delta(factors={"map": Factor(on_gpu(4, 1), on_gpu(5, 1))}, dense={"weight": on_gpu(4, 5)})
    expected = placement.off_device(edit).checksum()
    hashed: list[torch.Tensor] = []
    monkeypatch.setattr(delta, "tensor_digest", lambda tensor: hashed.append(tensor) or tensor_digest(tensor))
    copy = placement.off_device(edit)
    edit.know_copy(copy)
    assert edit.checksum() == copy.checksum() == expected and len(hashed) == 3
    edit.dense["weight"].add_(1)
    assert edit.checksum() != expected and len(hashed) == 4, "a changed tensor is read again"
    edit.dense["weight"] = on_gpu(4, 5) + 2
    assert edit.checksum() != expected and len(hashed) == 5, "and so is another one"
    assert copy.checksum() == expected
    with torch.inference_mode():
        edit.know_copy(placement.off_device(edit))  # has no versions by which a change would be seen


def test_a_stored_edit_is_hashed_on_its_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits on the GPU, and its checksum, a part of the keys of answers, asks the GPU for nothing."""
    subject = Subject("ft_m", "llama")
    model, hashed = build_model("llama"), []
    identity = model_identity(model, subject.tokenizer)
    monkeypatch.setattr(delta, "tensor_digest", lambda tensor: hashed.append(tensor.device) or tensor_digest(tensor))
    with pretended_device():
        move_model(model)
        editor = subject.make(num_steps=1)
        of_run = IndependentEdits(
            model, subject.tokenizer, editor, Store(tmp_path), identity, quiet=True, measure_edits=False
        )
        (edit,) = of_run.in_order([(EDIT_REQUESTS[0],)])
        assert isinstance(edit, Delta) and {update.device for update in edit.dense.values()} == {GPU}
        assert edit.checksum()
    assert hashed == [torch.device("cpu")]


def question(number: int) -> Any:
    request = EditRequest(prompt="{} is the capital of", subject=f"Port {number}", target_new="Dravonia")
    return instance({"edit_requests": [request.to_dict()], "case_id": request.key}, request.text, " Dravonia")


def test_a_run_warns_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all missing edits, by the size of the first; one that does not fit is answered all the same."""
    size = 4 * 32 * 64  # of a dense update of the tiny model
    disk = {"free": 0}
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda folder: Usage(20, 0, disk["free"]))
    monkeypatch.setattr(store_module, "LARGE_BYTES", 1)
    model = str(save_tiny(tmp_path / "tiny", "llama"))

    def answered(free: int, folder: str) -> tuple[list[float], str, int]:
        disk["free"] = free
        caplog.clear()
        lm = build(model, editor="ft_m", editor_args={"layers": [1], "num_steps": 1}, store=str(tmp_path / folder))
        with caplog.at_level(logging.WARNING, logger="lm_eval.edited_hf"):
            answers = lm.loglikelihood([question(number) for number in range(3)], disable_tqdm=True)
        (count, _) = Store(tmp_path / folder).size().get("deltas", (0, 0))
        return [answer.final.logprob for answer in answers], caplog.text, count

    enough, text, count = answered(1 + 3 * size, "enough")
    assert count == 3 and "has room for" not in text and "nearly full" not in text
    short, text, count = answered(3 * size, "short")
    assert short == enough and count == 3, "the disk of the test does not fill"
    assert "has room for 24.6kB, and 3 edits of 8.19kB take 24.6kB" in text and "lm-edit cache prune" in text
    full, text, count = answered(size, "full")
    assert full == enough and count == 0 and text.count("nearly full") == 1
