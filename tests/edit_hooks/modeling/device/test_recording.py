"""Recorded steps: tried before they are used, replayed with other contents, refused where they cannot be right."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from recorded_operations import recorded_on_a_cpu
from torch import nn

from edit_hooks.modeling.device import recording
from edit_hooks.modeling.device.recording import CudaRecorder, Step, recording_of, records, release_memory, tensors_in

CPU = torch.device("cpu")


class Counter:
    """A step on two tensors: ``total += weight * amount``.

    ``amount`` is on the host; a recording freezes it.
    """

    def __init__(self, start: float, amount: float, size: int = 3) -> None:
        self.total, self.factor = torch.full((size,), start), torch.arange(1.0, size + 1)
        self.amount = amount

    def step(self) -> None:
        self.total += self.factor * self.amount

    def recorded(self, model: nn.Module) -> Step | None:
        found = recording_of(model, "counter", self.step, tensors_in([self.total, self.factor]), [self.total])
        if found is None:
            return None
        self.total = found.tensors[0]
        return found.replay


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_replay_works_on_the_loaded_contents(model):
    with recorded_on_a_cpu() as recorder:
        for start in (0.0, 10.0, -4.0):
            counter = Counter(start, 2.0)
            expected = start + 3 * 2.0 * counter.factor
            replay = counter.recorded(model)
            assert torch.equal(counter.total, torch.full((3,), start)), "trials changed the contents"
            for _ in range(3):
                replay()
            assert torch.equal(counter.total, expected)
        assert recorder.num_captures == 1
        assert Counter(0.0, 2.0, size=4).recorded(model) and recorder.num_captures == 2, "other shapes"


def test_a_step_that_depends_on_the_host_is_refused(model, caplog):
    """Its first recording agrees with itself; with other contents it does not."""
    with recorded_on_a_cpu() as recorder, caplog.at_level(logging.WARNING):
        assert Counter(0.0, 2.0).recorded(model)
        other = Counter(1.0, 5.0)
        assert other.recorded(model) is None and torch.equal(other.total, torch.ones(3))
        assert not records(model, CPU) and records(nn.Linear(2, 2), CPU)
        assert recorder.num_captures == 1
    assert ["a replay differs from its step" in record.message for record in caplog.records] == [True]


def test_a_step_that_cannot_be_recorded_is_refused_once(model, caplog):
    with recorded_on_a_cpu(RuntimeError("operation not permitted\nwhen stream is capturing")):
        with caplog.at_level(logging.WARNING):
            counter = Counter(3.0, 2.0)
            assert counter.recorded(model) is None and torch.equal(counter.total, torch.full((3,), 3.0))
        assert not records(model, CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "Steps of edits are not recorded for Linear: RuntimeError: operation not permitted"
    ]


class Failing(Counter):
    """Its step fails midway."""

    def step(self) -> None:
        self.total += 7
        raise torch.OutOfMemoryError("no room")


def test_a_step_that_fails_in_its_trial_leaves_the_contents(model, caplog):
    """The caller goes on from them without a recording."""
    with recorded_on_a_cpu(), caplog.at_level(logging.WARNING):
        assert Counter(0.0, 2.0).recorded(model)
        other = Failing(1.0, 2.0)
        assert other.recorded(model) is None and torch.equal(other.total, torch.ones(3))
    assert "no room" in caplog.text


def test_tensors_that_a_recording_is_not_given_are_found(model):
    """By the recorder of the tests: a replay would go on reading what the recorded step read."""
    counter = Counter(0.0, 2.0)
    with pytest.raises(AssertionError, match="1 tensors"), recorded_on_a_cpu() as recorder:
        assert recording_of(model, "counter", counter.step, [counter.total], [counter.total])
    assert [tensor is counter.factor for tensor in recorder.unnamed] == [True]


def test_short_memory_gives_recordings_up(model):
    with recorded_on_a_cpu() as recorder:
        assert Counter(0.0, 2.0).recorded(model)
        release_memory()
        assert Counter(0.0, 2.0).recorded(model) and recorder.num_captures == 2


def test_models_that_other_code_takes_part_in_are_not_recorded(model, monkeypatch):
    with recorded_on_a_cpu():
        assert records(model, CPU)
        handle = model.register_forward_hook(lambda *_: None)
        assert not records(model, CPU)
        handle.remove()
        model.forward = model.forward
        assert not records(model, CPU)
        del model.forward
        for scope in (torch.autocast("cpu"), torch.inference_mode()):
            with scope:
                assert not records(model, CPU)
        monkeypatch.setenv(recording.SWITCH, "0")
        assert not records(model, CPU)
    assert not records(model, CPU), "no GPU"


def test_weights_at_another_place_are_another_recording(model):
    with recorded_on_a_cpu() as recorder:
        for _ in range(2):
            assert Counter(0.0, 2.0).recorded(model)
        model.weight = nn.Parameter(model.weight.detach().clone())
        assert Counter(0.0, 2.0).recorded(model) and recorder.num_captures == 2


def test_the_recording_that_was_not_used_for_longest_is_dropped(model, monkeypatch):
    monkeypatch.setattr(recording, "MOST_RECORDINGS", 2)
    with recorded_on_a_cpu() as recorder:
        for size in (1, 2, 1, 3, 1):
            assert Counter(0.0, 2.0, size).recorded(model)
        assert recorder.num_captures == 3
        assert Counter(0.0, 2.0, 2).recorded(model) and recorder.num_captures == 4


def test_recordings_take_a_part_of_the_memory(model, monkeypatch):
    with recorded_on_a_cpu() as recorder:
        monkeypatch.setattr(recording, "free_bytes", lambda _device: 100)
        assert Counter(0.0, 2.0).recorded(model) is None and recorder.num_captures == 0
        assert records(model, CPU), "later ones may fit"
        monkeypatch.setattr(recording, "free_bytes", lambda _device: 10**6)
        monkeypatch.setattr(recording, "MOST_BYTES", 30)
        for size in (1, 2, 3, 1):
            assert Counter(0.0, 2.0, size).recorded(model)
        assert recorder.num_captures == 4, "the first one was dropped for the third"


def test_a_step_that_waits_is_refused_without_an_error_in_other_threads(monkeypatch):
    """PyTorch's mode warns, of itself too; it is set back."""
    modes = ["default"]

    def set_mode(mode: str) -> None:
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with recording._waiting_is_refused():
        warnings.warn("something else", stacklevel=1)
    with pytest.raises(RuntimeError, match="reads from the device"), recording._waiting_is_refused():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert modes == ["default", "warn", "default", "warn", "default"]


class Stream:
    """A stream, and those that it has waited for."""

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """What a recorder uses of ``torch.cuda``; the stream of a graph stays current if its scope fails, as PyTorch's."""

    def __init__(self) -> None:
        self.current, self.captures = Stream(), list[tuple[object, Stream]]()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, _graph: object, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before
        self.captures.append((pool, stream))

    def set_stream(self, stream: Stream) -> None:
        self.current = stream


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("stream", "graph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(recording, "_waiting_is_refused", contextlib.nullcontext)
    return fake


def test_recordings_of_a_model_share_pool_and_stream(cuda, model):
    """The memory of a pool is given to the stream that asked for it first, and to no other."""
    recorder, other = CudaRecorder(), nn.Linear(2, 2)
    for one in (model, model, other):
        recorder.capture(one, lambda: None)
    first, second, third = cuda.captures
    assert first == second and first[0] is not third[0] and first[1] is not third[1]


@pytest.mark.parametrize("calls", [1, 2], ids=["before the capture", "in it"])
def test_after_a_failed_capture_the_host_goes_on_where_it_was(cuda, model, calls):
    """On its own stream, which has waited for what the step launched: the tensors are set back next."""
    own, left = cuda.current, [calls]

    def failing() -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder().capture(model, failing)
    assert cuda.current is own and not cuda.captures
    (side,) = own.waited_for
    assert side is not own and side.waited_for == [own]


def test_not_finite_results_agree_where_both_are_not():
    expected = torch.tensor([1.0, torch.nan, torch.inf])
    assert recording._difference(expected.clone(), expected) == 0
    assert recording._difference(torch.tensor([1.0, 2.0, torch.inf]), expected) == torch.inf
