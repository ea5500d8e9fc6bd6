"""MyEditor keeps the editor contract, and follows its reference."""

from __future__ import annotations

import pytest

from edit_hooks.contract import ALL_MODEL_TYPES, run_contract

EDITORS = ("my_editor:MyEditor", "my_hook_editor:MyHookEditor", "my_prompt_editor:MyPromptEditor")


@pytest.mark.parametrize("editor", EDITORS)
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_contract(model_type: str, editor: str) -> None:
    results = list(run_contract(editor, [model_type]))
    assert not [f"{result.check}: {result.reason}" for result in results if result.outcome == "failed"]


# Add a parity test: numbers of a reference implementation on a tiny model, with a tolerance and its reason.
