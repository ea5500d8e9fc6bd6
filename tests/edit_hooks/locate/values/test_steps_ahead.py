"""The loop for devices that run ahead: the values of the host's loop, and no step that the device waits for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from edit_runs import edits
from host_reads import HostReads, ahead_on_a_cpu
from pretended_device import move_model, pretended_device
from recorded_operations import recorded_on_a_cpu
from value_problems import EDIT_REQUESTS, LIMIT, SETTINGS, assert_same_values, keep_wide, loaded, problem

from edit_hooks.contract.subject import Subject, distance
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.locate.values import steps_ahead, suffix_forward
from edit_hooks.locate.values.steps_ahead import _Batch
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.locate.values.value_steps import GatheredLabels, mean_over_labels
from edit_hooks.modeling.device import run_ahead


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def between(values, step: int) -> float:
    """A bound that some edits are below at a step, and others are not."""
    losses = sorted(value.losses[min(step, len(value.losses) - 1)]["loss"] for value in values)
    return (losses[1] + losses[2]) / 2


@pytest.mark.parametrize(("model_type", "leaving_share"), [("llama", 0.25), ("gpt2", 2.0), ("gemma2", 0.25)])
def test_values_are_those_of_the_loop_on_the_host(model_type, leaving_share, monkeypatch):
    """Edits stop before any step, midway and never; Gemma 2 caps the scores of its attention."""
    monkeypatch.setattr(steps_ahead, "LEAVING_SHARE", leaving_share)
    model, tokenizer = loaded(model_type)
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    slow = dataclasses.replace(SETTINGS, lr=0.05, early_stop_loss=0.0)
    endless = optimize_values(model, problems, slow)
    for step in (0, 2):
        settings = dataclasses.replace(slow, early_stop_loss=between(endless, step))
        counts: list[int] = []
        expected = optimize_values(model, problems, settings)
        with ahead_on_a_cpu():
            found = optimize_values(model, problems, settings, progress=counts.append)
        assert_same_values(found, expected, LIMIT)
        assert sum(counts) == len(problems)
        assert len({value.num_updates for value in found}) > 1, "all edits stop at the same step"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_edit_alone_has_the_same_bits(dtype, monkeypatch):
    """With attention and means as on the host: the step that runs before the end is noticed changes nothing."""
    model, tokenizer = loaded("llama", dtype)
    one = [problem(tokenizer, EDIT_REQUESTS[0])]
    (endless,) = optimize_values(model, one, dataclasses.replace(SETTINGS, early_stop_loss=0.0))
    bound = endless.losses[2]["loss"] * 1.0001
    settings = dataclasses.replace(SETTINGS, early_stop_loss=bound)
    (expected,) = optimize_values(model, one, settings)
    num_steps = []
    step = _Batch._step
    monkeypatch.setattr(_Batch, "_step", lambda batch, number: num_steps.append(number) or step(batch, number))
    monkeypatch.setattr(suffix_forward, "runs_ahead", lambda _device: False)
    monkeypatch.setattr(GatheredLabels, "of", lambda batch: functools.partial(mean_over_labels, batch))
    with ahead_on_a_cpu():
        (found,) = optimize_values(model, one, settings)
    assert expected.stop_reason == "loss" and len(num_steps) == len(expected.losses) + 1
    assert found.losses == expected.losses and found.num_updates == expected.num_updates
    assert torch.equal(found.delta_D, expected.delta_D)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_no_step_waits_for_the_host(model_type):
    """After the first one, which tests the head of the model."""
    tokenizer, reads = loaded(model_type)[1], []
    step = _Batch._step

    def watched(batch, number):
        with HostReads() as mode:
            record = step(batch, number)
        reads.append(mode.found)
        return record

    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS[:2]]
    with pretended_device():
        model = build_model(model_type)
        move_model(model)
        with mock.patch.object(_Batch, "_step", watched):
            optimize_values(model, problems, dataclasses.replace(SETTINGS, num_steps=4))
    assert len(reads) == 4 and reads[1:] == [[]] * 3


@pytest.mark.parametrize("editor", ["memit", "bird", "evk_edit", "pmet"])
def test_editors_make_the_same_edits(editor):
    """Also with additional terms of the loss."""
    subject = Subject(editor, "llama", torch.float64)
    expected = edits(subject, subject.model, {})
    with ahead_on_a_cpu():
        found = edits(subject, subject.model, {})
    assert max(map(distance, found, expected)) < LIMIT


# -- recorded steps ----------------------------------------------------------------------------------------------------


def alone(model, problems, settings=SETTINGS):
    """A stream of single edits."""
    return [optimize_values(model, [one], settings)[0] for one in problems]


def test_recorded_steps_make_the_same_values():
    """Of single edits, whose shapes are in few buckets, and of several together; also on changed weights."""
    model, tokenizer = build_model("llama", dtype=torch.float64), loaded("llama")[1]
    problems = [problem(tokenizer, request, ["{}", "The band released. {}"]) for request in EDIT_REQUESTS]
    num_captures = []
    with recorded_on_a_cpu() as recorder:
        for _ in range(2):
            assert_same_values(alone(model, problems), with_plain_steps(alone, model, problems), LIMIT)
            num_captures.append(recorder.num_captures)
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.1)
                model.get_submodule("model.layers.2.mlp.down_proj").weight.mul_(0.9)
        together = optimize_values(model, problems, SETTINGS)
        assert_same_values(together, with_plain_steps(optimize_values, model, problems, SETTINGS), LIMIT)
    assert num_captures[0] < len(problems) and num_captures[1] == num_captures[0], "recordings are not used again"
    assert recorder.num_replays > 3 * len(problems)


def with_plain_steps(function, *args):
    """What a function returns outside of the recording scope."""
    with mock.patch.object(run_ahead, "KINDS", {"cuda"}):
        return function(*args)


def test_recorded_edits_stop_at_their_step():
    """Midway, with edits that go on."""
    model, tokenizer = loaded("llama")
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    slow = dataclasses.replace(SETTINGS, lr=0.05, early_stop_loss=0.0)
    settings = dataclasses.replace(slow, early_stop_loss=between(optimize_values(model, problems, slow), 2))
    expected = optimize_values(model, problems, settings)
    with recorded_on_a_cpu() as recorder:
        assert_same_values(optimize_values(model, problems, settings), expected, LIMIT)
    assert recorder.num_captures == 1 and len({value.num_updates for value in expected}) > 1


def test_steps_that_cannot_be_recorded_run_as_before(caplog):
    model, tokenizer = loaded("llama")
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS[:2]]
    expected = alone(model, problems)
    with recorded_on_a_cpu(RuntimeError("not permitted")), caplog.at_level("WARNING"):
        assert_same_values(alone(model, problems), expected, LIMIT)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("editor", "is_recorded"), [("memit", True), ("bird", False), ("pmet", False)])
def test_shapes_are_rounded_up_where_steps_are_recorded(editor, is_recorded, monkeypatch):
    subject, in_buckets = Subject(editor, "llama", torch.float64), []
    prepare = suffix_forward.SuffixForward._prepare
    monkeypatch.setattr(
        suffix_forward.SuffixForward, "_prepare", lambda self: in_buckets.append(self.in_buckets) or prepare(self)
    )
    with recorded_on_a_cpu() as recorder:
        subject.make(num_steps=5).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    assert in_buckets and {*in_buckets} == {is_recorded} and (recorder.num_captures > 0) == is_recorded


@pytest.mark.parametrize("limit", ["RECORDED_TOKENS", "RECORDED_PREFIX"])
def test_large_batches_are_not_recorded(limit, monkeypatch):
    monkeypatch.setattr(suffix_forward, limit, 8)
    model, tokenizer = loaded("llama")
    with recorded_on_a_cpu() as recorder:
        alone(model, [problem(tokenizer, EDIT_REQUESTS[0])])
    assert recorder.num_captures == 0
