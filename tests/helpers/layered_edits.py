"""Runs of MEMIT and its variants on tiny models in float64 where the model allows it."""

from __future__ import annotations

import functools

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.contract.tiny_models import (
    ALL_MODEL_TYPES,
    EDIT_LAYER,
    NATURAL_TOKENIZER,
    REQUESTS,
    SENTENCES,
    build_model,
    build_tokenizer,
)
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.modeling.architectures import is_transposed

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
EAGER_ONLY = {"gptj", "gemma2"}  # their softmax is float32 under every dtype of the weights
LAYERS = [0, EDIT_LAYER]

each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
each_normalized = pytest.mark.parametrize(
    "model_type", [name for name in ALL_MODEL_TYPES if ARCHITECTURES[name].normalizes_mlp_output]
)


@functools.cache
def load_wide(model_type: str):
    dtype = torch.float32 if model_type in EAGER_ONLY else torch.float64
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


def rounding_bound(model_type: str) -> float:
    """Largest relative difference that rounding explains."""
    return 1e-3 if model_type in EAGER_ONLY else 1e-8


@functools.cache
def covariance(model_type: str) -> dict[int, torch.Tensor]:
    moments = second_moments(*load_wide(model_type), LAYERS, MomentSettings(SENTENCES), quiet=True)
    # A ridge makes it well-conditioned, so that the forms compared below agree to many digits.
    return {n: m.matrix_FF.double() + 0.05 * torch.eye(len(m.matrix_FF)).double() for n, m in moments.items()}


def load_memit_like(name: str, model_type: str, **overrides):
    """MEMIT or a variant with five steps, the second moments of the model and intermediates."""
    fixed = {"second_moments": covariance(model_type), "keep_intermediates": True, "num_steps": 5}
    config = {**MEMIT_CONFIG, **fixed, **overrides}
    return load_editor(name, config=config)


def largest_difference(ours: Delta, theirs: Delta) -> float:
    """Largest relative difference of the updates of a weight."""
    first, second = ours.weights(), theirs.weights()
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in first)


def update_as_map(model_type: str, layer: int, delta: Delta) -> torch.Tensor:
    """The update of one layer as a map R^f -> R^d, float64."""
    name = ARCHITECTURES[model_type].rewrite_name(layer)
    update = delta.weights()[f"{name}.weight"].double()
    return update.T if is_transposed(load_wide(model_type)[0].get_submodule(name)) else update


def random_keys(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
