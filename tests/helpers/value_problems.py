"""Value-optimization problems on tiny models in float64, and the comparison of two solutions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import (
    ALL_MODEL_TYPES,
    CONTEXT_TEMPLATES,
    EDIT_LAYER,
    NATURAL_TOKENIZER,
    REQUESTS,
    build_model,
    build_tokenizer,
)
from edit_hooks.locate.rows import kl_row, rewriting_row
from edit_hooks.locate.value_optimization import OptimizedValue, ValueSettings

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]


SETTINGS = ValueSettings(
    layer=EDIT_LAYER,
    site="mlp",
    num_steps=6,
    lr=0.5,
    weight_decay=1e-2,
    clamp_factor=4.0,
    kl_factor=0.0625,
    early_stop_loss=0.05,
)


each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)


LIMIT = 1e-8  # largest relative difference that rounding explains in float64


class KeepWide(TorchFunctionMode):
    """Inside, nothing that is float64 becomes float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if entry is torch.float32 else entry for entry in args)
        return func(*args, **kwargs)


@functools.cache
def loaded(model_type: str, dtype: torch.dtype = torch.float64):
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


def problem(tokenizer, request: EditRequest, templates=CONTEXT_TEMPLATES):
    return [rewriting_row(tokenizer, request, text) for text in templates], kl_row(tokenizer, request)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def assert_same_values(ours: list[OptimizedValue], theirs: list[OptimizedValue], limit: float) -> None:
    """Offsets, captured activations, every loss of every step, and how each run ended."""
    for index, (value, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(value.losses) == len(other.losses), f"edit {index} stopped elsewhere"
        for record, expected in zip(value.losses, other.losses, strict=True):
            for part, number in expected.items():
                assert abs(record[part] - number) < limit * max(1, abs(number)), f"edit {index}: {part}"
        for name in ("delta_D", "v0_D", "keys_NF", "outputs_ND"):
            assert relative(getattr(value, name), getattr(other, name)) < limit, f"edit {index}: {name}"
        ends = [(v.num_updates, v.stop_reason, v.clamped) for v in (value, other)]
        assert ends[0] == ends[1], f"edit {index}"
