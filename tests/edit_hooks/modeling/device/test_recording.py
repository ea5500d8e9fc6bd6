"""Recorded steps: tried before they are used, replayed with other contents, refused where they cannot be right."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from recorded_operations import recorded_on_a_cpu
from torch import nn

from edit_hooks.modeling import memory
from edit_hooks.modeling.device import recording
from edit_hooks.modeling.device.recording import (
    CudaRecorder,
    Step,
    recording_of,
    records,
    refusals,
    release_memory,
    tensors_in,
)

CPU = torch.device("cpu")
KIND = "counting"


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
        found = recording_of(model, KIND, "counter", self.step, tensors_in([self.total, self.factor]), [self.total])
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
        assert not records(model, CPU, KIND) and records(nn.Linear(2, 2), CPU, KIND)
        assert recorder.num_captures == 1
    assert ["a replay differs from its step" in record.message for record in caplog.records] == [True]


def test_a_step_that_cannot_be_recorded_is_refused_once(model, caplog):
    error = RuntimeError("the capture is not valid")
    error.__context__ = RuntimeError("operation not permitted\nwhen stream is capturing")
    with recorded_on_a_cpu(error):
        with caplog.at_level(logging.WARNING):
            counter = Counter(3.0, 2.0)
            assert counter.recorded(model) is None and torch.equal(counter.total, torch.full((3,), 3.0))
        assert not records(model, CPU, KIND) and records(model, CPU, "another kind")
        reason = "RuntimeError: operation not permitted; RuntimeError: the capture is not valid"
        assert refusals(model) == {KIND: reason}
    assert [record.getMessage() for record in caplog.records] == [
        f"Steps of counting are not recorded for Linear: {reason}"
    ]


class Failing(Counter):
    """Its step fails midway."""

    def step(self) -> None:
        self.total += 7
        raise RuntimeError("no kernel")


def test_a_step_that_fails_in_its_trial_leaves_the_contents(model, caplog):
    """The caller goes on from them without a recording."""
    with recorded_on_a_cpu(), caplog.at_level(logging.WARNING):
        assert Counter(0.0, 2.0).recorded(model)
        other = Failing(1.0, 2.0)
        assert other.recorded(model) is None and torch.equal(other.total, torch.ones(3))
    assert "no kernel" in caplog.text


def test_a_step_that_does_not_fit_is_tried_again_if_it_is_smaller(model, caplog):
    """Short memory is no property of a model's steps."""
    with recorded_on_a_cpu() as recorder, caplog.at_level(logging.INFO):
        recorder.error = torch.OutOfMemoryError("no room")
        assert Counter(0.0, 2.0).recorded(model) is None and records(model, CPU, KIND)
        recorder.error = None
        for size, is_recorded in ((3, False), (4, False), (2, True)):
            assert (Counter(0.0, 2.0, size).recorded(model) is not None) == is_recorded
        assert Counter(0.0, 2.0).recorded(nn.Linear(2, 2)), "another model"
    assert ["memory is short" in record.message for record in caplog.records] == [True]


def test_a_replay_keeps_the_tensors_of_a_recording_that_was_dropped():
    """A graph does not, and would read and write freed memory."""
    tensor = torch.zeros(3)
    replay, kept = recording.Recording([tensor], [tensor], lambda: None).replay, weakref.ref(tensor)
    del tensor
    assert kept() is not None
    replay()


def test_after_a_failure_no_recording_is_replayed(model):
    """Of whatever kind: PyTorch's generator, which all graphs know, may have been left in the capture that failed."""
    with recorded_on_a_cpu() as recorder:
        total = torch.zeros(1)
        for kind in (KIND, "another kind"):
            assert recording_of(model, kind, None, lambda: total.add_(1), [total], [total])
        recorder.error = RuntimeError("operation not permitted")
        assert Counter(0.0, 2.0).recorded(model) is None
        recorder.error = None
        assert recording_of(model, "another kind", None, lambda: total.add_(1), [total], [total])
        assert recorder.num_captures == 3


def test_tensors_that_a_recording_is_not_given_are_found(model):
    """By the recorder of the tests: a replay would go on reading what the recorded step read."""
    counter = Counter(0.0, 2.0)
    with pytest.raises(AssertionError, match="1 tensors"), recorded_on_a_cpu() as recorder:
        assert recording_of(model, KIND, "counter", counter.step, [counter.total], [counter.total])
    assert [tensor is counter.factor for tensor in recorder.unnamed] == [True]


def test_short_memory_gives_recordings_up(model):
    with recorded_on_a_cpu() as recorder:
        assert Counter(0.0, 2.0).recorded(model)
        release_memory()
        assert Counter(0.0, 2.0).recorded(model) and recorder.num_captures == 2


def test_models_that_other_code_takes_part_in_are_not_recorded(model, monkeypatch):
    with recorded_on_a_cpu():
        assert records(model, CPU, KIND)
        handle = model.register_forward_hook(lambda *_: None)
        assert not records(model, CPU, KIND)
        handle.remove()
        model.forward = model.forward
        assert not records(model, CPU, KIND)
        del model.forward
        for scope in (torch.autocast("cpu"), torch.inference_mode()):
            with scope:
                assert not records(model, CPU, KIND)
        monkeypatch.setenv(recording.SWITCH, "0")
        assert not records(model, CPU, KIND)
    assert not records(model, CPU, KIND), "no GPU"


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
        assert records(model, CPU, KIND), "later ones may fit"
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


class Graph:
    """A CUDA graph; what is kept of it is its method."""

    def replay(self) -> None:
        """Nothing was recorded."""


class FakeCuda:
    """What a recorder uses of ``torch.cuda``; the stream of a graph stays current if its scope fails, as PyTorch's.

    Attributes:
        reserved: bytes that the allocator holds. undone: pools of captures that failed.
    """

    def __init__(self) -> None:
        self.current, self.captures = Stream(), list[tuple[object, Stream]]()
        self.reserved = 0
        self.undone: list[object] = []

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, _graph: object, stream: Stream, capture_error_mode: str, pool: object = None) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads would end the capture, or fail"
        self.reserved = 10  # the cache is emptied first
        before, self.current = self.current, stream
        yield
        self.current = before
        self.captures.append((pool, stream))

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def end(self, _index: int, pool: object) -> None:
        self.undone.append(pool)
        raise RuntimeError("not currently recording to mempool_id")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("stream", "graph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: fake.reserved)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end, raising=False)
    monkeypatch.setattr(recording, "_waiting_is_refused", contextlib.nullcontext)
    return fake


def test_recordings_of_a_model_share_pool_and_stream(cuda, model):
    """The memory of a pool is given to the stream that asked for it first, and to no other."""
    recorder, other = CudaRecorder(), nn.Linear(2, 2)
    kept = [recorder.capture(one, lambda: None) for one in (model, model, other)]
    first, second, third = cuda.captures
    assert first == second and first[0] is not third[0] and first[1] is not third[1] and len(kept) == 3


def test_a_pool_ends_with_its_last_graph(cuda, model):
    """PyTorch asserts that graphs use a pool that is recorded into again; its stream goes on."""
    recorder = CudaRecorder()
    for _ in range(2):
        kept = [recorder.capture(model, lambda: None) for _ in range(2)]
        del kept[0]
        kept.append(recorder.capture(model, lambda: None))
        del kept[:]
    pools, streams = zip(*cuda.captures, strict=True)
    assert [pools.index(pool) for pool in pools] == [0, 0, 0, 3, 3, 3] and len({*streams}) == 1


def test_the_memory_of_graphs_is_not_free(cuda, model, monkeypatch):
    """The allocator reserves it, counts it as unused, and gives it to nothing else until all graphs are gone."""

    def step() -> None:
        cuda.reserved += 7

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100, 1000))
    recorder = CudaRecorder()
    kept = [recorder.capture(model, step) for _ in range(2)]
    assert memory.graph_bytes[CPU] == 14
    cuda.reserved = 25
    assert memory.free_cuda_bytes(CPU) == 100 + 25 - 5 - 14
    del kept[0]
    assert memory.graph_bytes[CPU] == 14
    del kept[0]
    assert memory.graph_bytes[CPU] == 0


@pytest.mark.parametrize("calls", [1, 2], ids=["before the capture", "in it"])
def test_after_a_failed_capture_the_host_goes_on_where_it_was(cuda, model, calls):
    """On its own stream, which has waited for what the step launched: the tensors are set back next.

    Before 2.13, PyTorch's allocator and its generator behave as if the capture had not ended. The allocator is reset
    by a call, the generator by an empty capture.
    """
    own, left = cuda.current, [calls]

    def failing() -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder().capture(model, failing)
    (side,) = own.waited_for
    assert cuda.current is own and side is not own and side.waited_for == [own]
    assert len(cuda.undone) == (calls == 2) and cuda.captures == [(None, side)] * (calls == 2)


def test_not_finite_results_agree_where_both_are_not():
    expected = torch.tensor([1.0, torch.nan, torch.inf])
    assert recording._difference(expected.clone(), expected) == 0
    assert recording._difference(torch.tensor([1.0, 2.0, torch.inf]), expected) == torch.inf
