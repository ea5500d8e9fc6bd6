"""A context length beyond the positions of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, case, instance

from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES
from edit_hooks.modeling.forward.positions import has_position_table, num_positions
from edit_hooks.utils.errors import EditingError

PROMPT = "Port Elna is the capital of"


@pytest.mark.parametrize("family", ALL_MODEL_TYPES)
def test_a_model_with_a_table_fails_beyond_it(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family)
    positions = num_positions(model.config)
    too_long = torch.ones(1, (positions or 128) + 1, dtype=torch.long)
    fails = False
    try:
        model(input_ids=too_long)
    except (IndexError, RuntimeError):
        fails = True
    assert has_position_table(model) == fails


def test_a_max_length_beyond_a_table_is_refused_before_loading(tiny_path: Callable[..., Path]) -> None:
    for options in ({"editor": "ike", "editor_args": {"embedder": "words"}}, {"mode": "none"}):
        with pytest.raises(EditingError, match=r"max_length=400, but the model has a table of 128 positions\. Use at"):
            build(str(tiny_path("gpt2")), max_length=400, **options)
    assert build(str(tiny_path("gpt2")), max_length=128).max_length == 128


def test_a_max_length_beyond_trained_positions_is_logged(
    tiny_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    build(str(tiny_path("llama")), max_length=400)
    assert "max_length=400 is beyond the 128 positions of the model's config" in caplog.text
    caplog.clear()
    build(str(tiny_path("llama")), max_length=100)
    assert "max_length" not in caplog.text


@pytest.mark.parametrize(
    ("max_length", "remedy"),
    [
        (64, "They need a larger max_length, or shorter prompts."),
        (128, "They need shorter prompts (the model has no more positions)."),
    ],
)
def test_a_larger_max_length_is_advised_where_there_is_one(
    max_length: int, remedy: str, tiny_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    lm = build(str(tiny_path("gpt2")), max_length=max_length)
    lm.loglikelihood([instance(case(), prompt, " Dravonia") for prompt in (200 * "x " + PROMPT, PROMPT)])
    assert remedy in caplog.text
