"""Edits of float64 models compute in float64: a number that passes through torch's default precision moves with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from golden_data import golden_case
from parity_layers import memit_config

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.base.registry import editor_class, editor_names
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject

EDITORS = [name for name in editor_names() if editor_class(name).writes != ("context",)]


@pytest.fixture
def wide_default() -> Iterator[Callable[[], None]]:
    """Makes float64 the default precision, until the end of the test."""
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def tensors_of(delta: Delta) -> dict[str, torch.Tensor]:
    hook_edit = {} if delta.hook_edit is None else delta.hook_edit.tensors
    state = {f"state {name}": tensor for name, tensor in delta.stream_state.items()}
    return {**delta.weights(), **{f"hook {name}": tensor for name, tensor in hook_edit.items()}, **state}


def assert_equal(ours: list[Delta], others: list[Delta]) -> None:
    for one, other in zip(ours, others, strict=True):
        assert one.diagnostics["losses"] == other.diagnostics["losses"]
        first, second = tensors_of(one), tensors_of(other)
        assert first and first.keys() == second.keys()
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("editor", EDITORS)
def test_an_edit_in_float64_does_not_depend_on_the_default_precision(editor, wide_default):
    subject = Subject(editor, "gpt2", torch.float64)
    usual = subject.edit(EDIT_REQUESTS[:2])
    wide_default()
    assert_equal(usual, subject.edit(EDIT_REQUESTS[:2]))


def test_pmet_weighs_reached_targets_by_a_tenth(wide_default, golden_model):
    """Its factor of 0.1 was that of float32, off by 1.5e-8, once every target token is the most likely one."""
    case, _ = golden_case("pmet", "tiny-gpt2", "near-batch45-float64")
    loaded = golden_model("tiny-gpt2", torch.float64)
    requests = [EditRequest(**record) for record in case["steps"][0]["requests"]]
    settings = {**memit_config(case, "tiny-gpt2", "none"), "second_moments": None}

    def edits() -> list[Delta]:
        return load_editor("pmet", settings).edit(*loaded, requests, joint=True)

    usual = edits()
    wide_default()
    assert_equal(usual, edits())
