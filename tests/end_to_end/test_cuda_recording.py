"""On a GPU: steps of edits wait for nothing, and recorded ones (CUDA graphs) make the edits of the others.

Skipped without one. Needs no lm-eval (`pytest --noconftest` runs it where that is not installed).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from edit_hooks import Delta
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.locate.values import steps_ahead
from edit_hooks.modeling.device import recording
from edit_hooks.modeling.device.recording import CudaRecorder, refusals
from edit_hooks.modeling.memory import free_cuda_bytes, graph_bytes

DEVICE = torch.device("cuda", 0)
# CI has no GPU; there a recorder of operations takes the place of CUDA (tests/helpers/recorded_operations.py).
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each_model = pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "gemma3_text"])


def edits(subject: Subject, settings: dict[str, Any]) -> list[Delta]:
    """Two edits alone, then together."""
    editor = subject.make(**settings)
    alone = [editor.edit(subject.model, subject.tokenizer, [request])[0] for request in EDIT_REQUESTS[:2]]
    return [*alone, *editor.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:2])]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for every recording that is made."""
    made: list[str] = []

    class Counting(CudaRecorder):
        def capture(self, model, step):
            replay = super().capture(model, step)
            made.append(type(model).__name__)
            return replay

    monkeypatch.setattr(recording, "RECORDER", Counting())
    monkeypatch.setattr(recording, "_recordings", type(recording._recordings)())  # none of earlier tests
    yield made


@each_model
@pytest.mark.parametrize("editor", ["rome", "memit"])
def test_recorded_steps_make_the_same_edits(editor, model_type, captures, monkeypatch):
    """Those of single steps, and those of the CPU."""
    here, there = (Subject(editor, model_type, torch.float64, device) for device in (torch.device("cpu"), DEVICE))
    settings = {"num_steps": 6, "context_templates": ["{}", "The band released. {}"]}
    recorded = edits(there, settings)
    assert captures and not refusals(there.model)
    monkeypatch.setenv(recording.SWITCH, "0")
    plain, expected = edits(there, settings), edits(here, settings)
    assert max(map(distance, recorded, plain)) < 1e-6
    assert max(map(distance, recorded, expected)) < 1e-4  # norms compute in float32


@pytest.mark.parametrize(
    ("editor", "settings"), [("grace", {}), ("lora", {"dropout": 0.0}), ("lora", {"kind": "adalora", "dropout": 0.0})]
)
def test_recorded_training_steps_make_the_same_edits(editor, settings, captures, monkeypatch):
    subject = Subject(editor, "llama", torch.float64, DEVICE)
    settings = {**settings, "num_steps": 10}
    recorded = edits(subject, settings)
    assert captures and not refusals(subject.model)
    monkeypatch.setenv(recording.SWITCH, "0")
    assert max(map(distance, recorded, edits(subject, settings))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_stream_of_single_edits_replays_few_recordings(dtype, captures, monkeypatch):
    subject = Subject("rome", "llama", dtype, DEVICE)
    editor = subject.make(num_steps=6)
    made = [editor.edit(subject.model, subject.tokenizer, [request])[0] for request in EDIT_REQUESTS * 2]
    assert 0 < len(captures) <= len(EDIT_REQUESTS)
    monkeypatch.setenv(recording.SWITCH, "0")
    for request, delta in zip(EDIT_REQUESTS * 2, made, strict=True):
        (plain,) = editor.edit(subject.model, subject.tokenizer, [request])
        recorded, other = (subject.target_nll(one, request) for one in (delta, plain))
        assert recorded == pytest.approx(other, abs={torch.float32: 1e-3, torch.bfloat16: 0.25}[dtype])


@each_model
def test_no_step_waits(model_type, monkeypatch):
    """After the first one, which tests the head of the model; an operation that waits raises."""
    monkeypatch.setenv(recording.SWITCH, "0")
    subject = Subject("memit", model_type, torch.float32, DEVICE)
    launch, numbers = steps_ahead._Batch._launch, []

    def watched(batch, number):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            launch(batch, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        numbers.append(number)

    monkeypatch.setattr(steps_ahead._Batch, "_launch", watched)
    subject.make(num_steps=4).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:2])
    assert max(numbers) == 3


def test_a_capture_that_fails_leaves_nothing():
    """PyTorch alone would refuse to draw numbers and to replay, and before 2.13 to give memory back."""
    model, recorder, number = build_model("llama").to(DEVICE), CudaRecorder(), torch.zeros(3, device=DEVICE)
    earlier, calls = recorder.capture(model, lambda: number.add_(1)), []

    def reads_in_the_capture() -> None:
        calls.append(number.add_(1))
        if len(calls) == 2:
            number.tolist()

    with pytest.raises(RuntimeError):
        recorder.capture(model, reads_in_the_capture)
    assert len(calls) == 2 and not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    assert torch.rand(3, device=DEVICE).isfinite().all()
    number.zero_()
    earlier()
    assert number.tolist() == [1, 1, 1]
    recorder.capture(model, lambda: number.add_(1))()
    assert number.tolist() == [3, 3, 3], "the run before the capture, and the replay"


def test_memory_of_graphs_is_counted_and_given_back():
    """Recordings of a model share a pool, which ends with the last of them."""
    model, recorder = build_model("llama").to(DEVICE), CudaRecorder()

    def step() -> None:
        torch.ones(2**22, device=DEVICE).exp().sum()

    for _ in range(2):
        torch.cuda.empty_cache()
        before, free = graph_bytes[DEVICE], free_cuda_bytes(DEVICE)
        replays = [recorder.capture(model, step) for _ in range(2)]
        assert graph_bytes[DEVICE] - before >= 2**24
        assert free - free_cuda_bytes(DEVICE) >= 2**24
        replays.pop()()
        assert graph_bytes[DEVICE] > before
        replays.clear()
        assert graph_bytes[DEVICE] == before
