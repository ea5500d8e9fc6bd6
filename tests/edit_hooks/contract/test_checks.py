"""Every check of the contract finds the defect it is there for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from broken_editors import LeavesGlobalHook

import edit_hooks.contract.checks as checks
from edit_hooks.contract import subject
from edit_hooks.contract.checks import CHECKS
from edit_hooks.contract.runner import CheckResult, run_contract
from edit_hooks.deltas.row_adapters import PerRowAdapters

DEFECTS = {
    "restore": ("Restore", "left the model or the tokenizer changed: .*weight"),
    "interrupt": ("Interrupt", "after an interrupt in the progress callback this has changed"),
    "effect": ("Effect", "the answer to .* does not move"),
    "target": ("Target", "the targets' mean NLL goes from"),
    "batch": ("Batch", "alone and in a batch differ"),
    "padding": ("Padding", "reversed and padded on the left, edits differ"),
    "null": ("Null", "an empty list of requests gives an edit"),
    "joint": ("Joint", "a joint edit of one request differs from the single edit"),
    "stream": ("Stream", "a repeated stream differs"),
    "save": ("Save", "metadata changes on disk"),
    "seed": ("Seed", "global generator"),
    "gradients_off": ("GradientsOff", "AssertionError"),
    "training_mode": ("TrainingMode", "depends on the model's training mode"),
    "errors": ("Errors", "an unknown setting is accepted"),
    "diagnostics": ("Diagnostics", "diagnostics are not plain JSON"),
    "generation": ("own_hook_editor:PromptOnly", "token . of a text written .* less likely .* decoding steps"),
    "repeat": ("Repeat", "a second edit of the same request by one editor object differs"),
    "layers": ("Layers", r"with layers=\[2\] the edit is in block 1"),
    "context": ("Context", "the editor tokenizes .*, not the text of the request in its context"),
}
OTHER_DEFECTS = [
    ("restore", "LeavesDropout", r"after editing this has changed: value of .*drop.*\.p"),
    ("restore", "LeavesGlobalHook", "this has changed: hooks of all modules, _global_forward_pre_hooks"),
    ("restore", "LeavesGradientHook", "this has changed: hooks on the gradient of "),
    ("restore", "DrawsPython", "this has changed: random state of Python"),
    ("restore", "DrawsNumpy", "this has changed: random state of numpy"),
    ("interrupt", "NoProgress", "progress is never called"),
    ("interrupt", "Swallows", "the editor swallows an interrupt in the progress callback"),
    ("joint", "JointDrops", "a joint edit of two requests is the edit of 'The mother tongue.* alone"),
    ("repeat", "WritesConfig", "the editor changes num_steps of job.config"),
    ("generation", "own_hook_editor:ForgetsRows", "less likely .* row_state"),
    ("stream", "own_hook_editor:CombinesToLast", "the prompt of the first is answered unedited"),
]
# The engine keeps these promises, so it is broken in the tests below.
OF_THE_ENGINE = {"rows", "foreign_model"}


@pytest.fixture(autouse=True)
def fresh_models() -> Iterator[None]:
    """Defects may damage the models, which subjects share."""
    yield
    while LeavesGlobalHook.handles:
        LeavesGlobalHook.handles.pop().remove()
    subject.tiny_model.cache_clear()
    subject.tiny_tokenizer.cache_clear()


def run(editor: str, *names: str) -> list[CheckResult]:
    path = editor if ":" in editor else f"broken_editors:{editor}"
    return list(run_contract(path, ["gpt2"], names or None))


@pytest.mark.parametrize("editor", ["Sound", "own_hook_editor:Steer"])
def test_a_sound_editor_passes(editor: str) -> None:
    assert [result.check for result in run(editor) if result.outcome == "passed"] == [check.name for check in CHECKS]


def test_an_editor_that_needs_no_logits_is_interrupted_in_the_blocks() -> None:
    (result,) = run("ClosedForm", "interrupt")
    assert result.outcome == "passed", result.reason


def test_every_check_has_a_defect() -> None:
    assert {check.name for check in CHECKS} == DEFECTS.keys() | OF_THE_ENGINE


@pytest.mark.parametrize(
    ("check", "editor", "message"), [*((check, *defect) for check, defect in DEFECTS.items()), *OTHER_DEFECTS]
)
def test_a_defect_is_found(check: str, editor: str, message: str) -> None:
    (result,) = run(editor, check)
    assert result.outcome == "failed"
    assert re.search(message, result.reason), result.reason


def test_rows_that_mix_up_edits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PerRowAdapters.__init__

    def reversed_rows(self: PerRowAdapters, model: Any, deltas: Any, *rest: Any, **named: Any) -> None:
        original(self, model, list(deltas)[::-1], *rest, **named)

    monkeypatch.setattr(PerRowAdapters, "__init__", reversed_rows)
    (result,) = list(run_contract("rome", ["gpt2"], ["rows"]))
    assert result.outcome == "failed" and "a row answers otherwise beside other edits" in result.reason


def test_deltas_applied_to_foreign_models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "edited", lambda *_: contextlib.nullcontext())
    (result,) = run("Sound", "foreign_model")
    assert result.outcome == "failed" and "a delta of a gpt2 model is applied to a llama model" in result.reason
