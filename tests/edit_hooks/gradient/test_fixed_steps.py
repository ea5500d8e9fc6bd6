"""Training steps of a fixed number on a GPU: nothing waits for the host, and recorded steps train the same edits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from host_reads import HostReads, ahead_on_a_cpu
from pretended_device import move_model, pretended_device
from recorded_operations import recorded_on_a_cpu

from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, distance
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.editors.lora import LoRAConfig, LoRAFactors, orthogonality
from edit_hooks.gradient.stepping.dropout import Dropout, StepNoise
from edit_hooks.gradient.stepping.fixed_steps import FixedSteps

CPU = torch.device("cpu")
SETTINGS = [
    ("grace", {}),
    ("lora", {"dropout": 0.0, "kind": "adalora", "initial_rank": 2, "modules": ["query_value"], "layers": [0, 1]}),
]


def stream(subject: Subject, settings):
    """Two edits one by one, then together."""
    editor = subject.make(num_steps=8, **settings)
    alone = [editor.edit(subject.model, subject.tokenizer, [request])[0] for request in EDIT_REQUESTS[:2]]
    return [*alone, *editor.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:2])]


@pytest.mark.parametrize(("editor", "settings"), SETTINGS)
def test_recorded_steps_train_the_same_edits(editor, settings):
    subject = Subject(editor, "llama", torch.float64)
    expected = stream(subject, settings)
    with ahead_on_a_cpu():
        plain = stream(subject, settings)
    with recorded_on_a_cpu() as recorder:
        recorded = stream(subject, settings)
    for found in (plain, recorded):
        assert max(map(distance, found, expected)) < 1e-10
        losses = [[delta.diagnostics["losses"] for delta in deltas] for deltas in (found, expected)]
        for curve, other in zip(*losses, strict=True):
            assert [step["loss"] for step in curve] == pytest.approx([step["loss"] for step in other], abs=1e-9)
    assert recorder.num_captures in (2, 3) and recorder.num_replays > 3 * 6


FAST = {"lr": 0.05, "num_steps": 12}


@pytest.mark.parametrize(
    ("editor", "settings", "dtype"),
    [
        ("ft_m", FAST, torch.float64),
        ("ft_m", {**FAST, "layers": [0, 1]}, torch.bfloat16),
        ("ft_l", {**FAST, "norm_constraint": 0.01}, torch.bfloat16),  # its start is a copy
        ("crisp_edit", FAST, torch.float32),
    ],
)
def test_fine_tuning_stops_at_its_step(editor, settings, dtype):
    """One step more is launched before the host knows; the optimizer skips it on the device."""
    subject = Subject(editor, "llama", dtype)

    def alone(bound):
        made = subject.make(**{**settings, "early_stop_loss": bound})
        return [made.edit(subject.model, subject.tokenizer, [request])[0] for request in EDIT_REQUESTS[:2]]

    losses = [step["loss"] for step in alone(0.0)[0].diagnostics["losses"]]
    bound = sum(losses[2:4]) / 2
    expected = alone(bound)
    assert expected[0].diagnostics["stop_reason"] == "loss"
    with ahead_on_a_cpu():
        plain = alone(bound)
    with recorded_on_a_cpu() as recorder:
        recorded = alone(bound)
    limit = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-10}[dtype]
    if dtype == torch.bfloat16:  # the attention rounds otherwise, which can move the end by a step
        expected = plain
    for found in (plain, recorded):
        assert max(map(distance, found, expected)) < limit
        for one, other in zip(found, expected, strict=True):
            for name in ("steps", "stop_reason"):
                assert one.diagnostics[name] == other.diagnostics[name]
    assert bool(recorder.num_replays) == (editor != "crisp_edit")


def test_a_training_that_is_over_is_not_recorded():
    """Its step would be skipped, so that the trials of the recording would not try the update."""
    subject = Subject("ft_m", "llama")
    editor = subject.make(num_steps=12, early_stop_loss=1e9)
    with recorded_on_a_cpu() as recorder:
        (edit,) = editor.edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    assert edit.diagnostics["steps"] == recorder.num_captures == 0


def test_gradients_have_the_layout_of_what_is_trained():
    """Fused optimizers read both as flat memory; that of stacked transposed maps comes transposed."""
    x, trained = torch.arange(12.0).view(2, 2, 3), []
    for is_fused in (False, True):
        leaf = torch.zeros(2, 4, 3).requires_grad_()
        optimizer = torch.optim.Adam([leaf], lr=0.1, fused=is_fused)
        target = torch.arange(16.0).view(2, 2, 4) - 3

        def evaluate(leaf=leaf, target=target):
            loss_R = ((x @ leaf.mT - target) ** 2).sum((1, 2))
            return loss_R.sum(), loss_R

        FixedSteps(torch.nn.Linear(1, 1), optimizer, evaluate, "training", None, []).run(3)
        trained.append(leaf.detach())
    torch.testing.assert_close(*trained)


def test_recorded_steps_have_fresh_dropout():
    """The numbers of a step are drawn before it, also for an edit that replays the steps of another."""
    subject = Subject("lora", "llama", torch.float64)
    settings = {"dropout": 0.5, "modules": ["query_value"], "layers": [1]}
    with ahead_on_a_cpu():
        plain = stream(subject, settings)
    with recorded_on_a_cpu() as recorder:
        recorded = stream(subject, settings)
        captures = recorder.num_captures
        subject.make(num_steps=8, **settings).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[2:3])
    assert recorder.num_captures == captures, "a row of 22 tokens replays the steps of one of 21"
    assert recorder.num_replays and max(map(distance, recorded, plain)) < 1e-10
    assert min(map(distance, plain, stream(subject, {**settings, "dropout": 0.0}))) > 1e-3


@pytest.mark.parametrize(("editor", "settings"), [SETTINGS[0], ("lora", {"dropout": 0.1, "kind": "adalora"})])
def test_no_step_waits_for_the_host(editor, settings):
    launch, reads = FixedSteps._launch, []

    def watched(steps):
        with HostReads() as mode:
            launch(steps)
        reads.append(mode.found)

    subject = Subject(editor, "llama")
    with pretended_device():
        model = build_model("llama")
        move_model(model)
        with mock.patch.object(FixedSteps, "_launch", watched):
            subject.make(num_steps=3, **settings).edit(model, subject.tokenizer, EDIT_REQUESTS[:2])
    assert len(reads) == 3 and reads[1:] == [[]] * 2


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one edit", "stacked"])
def test_orthogonality_is_the_same_in_few_products(shape):
    config = LoRAConfig(kind="adalora")
    generator = torch.Generator().manual_seed(0)
    adapters = [
        LoRAFactors(*(torch.randn(*shape, *size, generator=generator) for size in ((2, wide), (5, 2), (2, 1))))
        for wide in (4, 4, 7)
    ]
    expected = orthogonality(adapters, config, CPU)
    with ahead_on_a_cpu(), HostReads() as mode:
        found = orthogonality(adapters, config, CPU)
    torch.testing.assert_close(found, expected)
    assert found.shape == shape and mode.num_operations < 50


def test_noise_of_a_step_is_divided_among_modules_and_edits():
    noise = StepNoise([2, 3], [4, 1], CPU, seed=0)
    for buffer in noise.buffers:
        buffer.copy_(torch.arange(float(len(buffer))))
    first, second = noise.of_module(0), noise.of_module(1)
    assert [tuple(part.shape) for part in (*first, *second)] == [(2, 4), (3, 4), (2, 1), (3, 1)]
    assert second[1].flatten().tolist() == [12, 13, 14]
    dropout = Dropout(0.5, CPU, 0, 0, [2, 3])
    dropout.drawn = [torch.tensor([[0.1], [0.9]]), torch.tensor([[0.9], [0.1], [0.6]])]
    kept = dropout(torch.ones(2, 4, 1))[..., 0]
    assert kept.tolist() == [[0, 2, 0, 0], [2, 0, 2, 0]], "columns behind a row are dropped"
