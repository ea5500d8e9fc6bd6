"""Compiled models: a graph compiled before an edit ignores the hooks that make, apply and read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from edit_hooks import Delta, EditingError, edited, load_editor
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.lm import EditedHFLM


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_decoder(model: Any) -> Any:
    model.model.compile(backend="eager")
    return model


def compiled_block(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("compiled", [compiled_forward, compiled_in_place, compiled_decoder, compiled_block, wrapped])
def test_a_compiled_model_is_refused(compiled: Callable[[Any], Any]) -> None:
    subject = Subject("r_rome", "llama")
    model = compiled(build_model("llama"))
    for editor in ("r_rome", "grace"):
        with pytest.raises(EditingError, match=r"is compiled \(torch\.compile\).*as it was before torch\.compile"):
            load_editor(editor).edit(model, subject.tokenizer, EDIT_REQUESTS[:1])
    with pytest.raises(EditingError, match=r"is compiled \(torch\.compile\)"):
        EditedHFLM(pretrained=model, tokenizer=subject.tokenizer, mode="none", store="off").load()


def test_a_hook_edit_is_not_applied_to_a_compiled_model() -> None:
    subject = Subject("grace", "llama")
    (delta,) = subject.make(**subject.settings).edit(subject.model, subject.tokenizer, EDIT_REQUESTS[:1])
    assert isinstance(delta, Delta) and delta.hook_edit is not None
    with pytest.raises(EditingError, match=r"is compiled \(torch\.compile\)"), edited(wrapped(subject.model), delta):
        pass
