"""Recorded steps: tried before they are used, replayed with other contents, refused where they cannot be right."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from recorded_operations import recorded_on_a_cpu
from torch import nn

from edit_hooks.modeling.device import recording
from edit_hooks.modeling.device.recording import Step, recording_of, records, tensors_in

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


def test_models_that_other_code_takes_part_in_are_not_recorded(model, monkeypatch):
    with recorded_on_a_cpu():
        assert records(model, CPU)
        handle = model.register_forward_hook(lambda *_: None)
        assert not records(model, CPU)
        handle.remove()
        model.forward = model.forward
        assert not records(model, CPU)
        del model.forward
        with torch.autocast("cpu"):
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


def test_not_finite_results_agree_where_both_are_not():
    expected = torch.tensor([1.0, torch.nan, torch.inf])
    assert recording._difference(expected.clone(), expected) == 0
    assert recording._difference(torch.tensor([1.0, 2.0, torch.inf]), expected) == torch.inf
