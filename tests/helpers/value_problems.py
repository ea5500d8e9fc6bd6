"""Value-optimization problems on tiny models in float64, and the comparison of two solutions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

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
from edit_hooks.locate.values.rows import kl_row, rewriting_row
from edit_hooks.locate.values.value_steps import OptimizedValue, ValueSettings

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


@contextlib.contextmanager
def keep_wide() -> Iterator[None]:
    """Inside, nothing that is float64 becomes float32.

    The functions that models and engines narrow with are replaced: a torch function mode, which sees every operation,
    makes loops on tiny models take twice as long.
    """
    to = torch.Tensor.to

    def widened(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if entry is torch.float32 else entry for entry in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return to(tensor, *args, **kwargs)

    def with_dtype(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("dtype") is torch.float32 and tensor.dtype == torch.float64:
                kwargs["dtype"] = torch.float64
            return function(tensor, *args, **kwargs)

        return call

    product = torch.Tensor.__matmul__

    def of_one_type(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        both = torch.promote_types(left.dtype, right.dtype)
        return product(to(left, both), to(right, both))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda tensor: widened(tensor, torch.float32))
        patch.setattr(torch.Tensor, "to", widened)
        # Some versions of transformers multiply the frequencies, float64 in here, by positions in float32.
        patch.setattr(torch.Tensor, "__matmul__", of_one_type)
        for place in (torch, torch.nn.functional, torch.Tensor):
            for name in ("softmax", "log_softmax", "sum", "mean", "cumsum"):
                if hasattr(place, name):
                    patch.setattr(place, name, with_dtype(getattr(place, name)))
        yield


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
