"""Facts to tune on for the tiny models, and quick settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER
from lm_edit.tuning import search
from lm_edit.tuning.candidates import step_of
from lm_edit.tuning.trials import Trial, TrialRunner
from lm_eval_tasks.common.records.cases import Case, Question

QUICK = {"layers": [EDIT_LAYER], "num_steps": 4, "context_templates": CONTEXT_TEMPLATES[:2]}
CASES = [
    Case(
        EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome", target_true="Brenholt"),
        [Question("The harbour of Port Amelin lies in", "Rome", "Brenholt"), Question("Amelin is in", "Rome", "Velm")],
        [Question("The village of Brenholt is in", "Velm", "Rome")],
    ),
    Case(
        EditRequest(prompt="The mother tongue of {} is", subject="Elena Marković", target_new="French"),
        [],
        [Question("The official language of the region is", "Spanish"), Question("He speaks", "English")],
    ),
    Case(
        EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Hamburg", target_true="Velm"),
        [Question("Ostravia's capital is", "Hamburg", "Velm")],
        [Question("The largest city of Ostravia is", "Karsk", "Hamburg")],
    ),
]


def tune(
    tiny: tuple[Any, Any],
    editor: str,
    candidates: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    store: Any = None,
    **options: Any,
) -> list[Trial]:
    """Score candidates of an editor on a tiny model and its tokenizer."""
    return search.tune(TrialRunner(*tiny, editor, store), candidates, cases, **options)


def start_at(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches for a step start at this size, not at the editor's own."""

    def step_from(*arguments: Any) -> Any:
        step = step_of(*arguments)
        assert step is not None
        return dataclasses.replace(step, size=size)

    monkeypatch.setattr(search, "step_of", step_from)
