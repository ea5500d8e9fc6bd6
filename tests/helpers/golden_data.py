"""Read the parity numbers under `tests/golden` (what they are: `tests/golden/README.md`)."""

from __future__ import annotations

import functools
import json
import lzma
from typing import Any

import torch
from paths import GOLDEN
from safetensors.torch import load as load_safetensors

GOLDEN_MODELS = ("tiny-gpt2", "tiny-llama")


def golden_json(relative: str) -> Any:
    """The parsed JSON file `golden/<relative>.json`."""
    return json.loads((GOLDEN / f"{relative}.json").read_text(encoding="utf-8"))


@functools.cache
def golden_tensors(relative: str) -> dict[str, torch.Tensor]:
    """All tensors of `golden/<relative>.safetensors.xz`."""
    return load_safetensors(lzma.decompress((GOLDEN / f"{relative}.safetensors.xz").read_bytes()))


def golden_names(method: str) -> list[tuple[str, str]]:
    """(model, case) of every run of a method's own code."""
    models = [model for model in GOLDEN_MODELS if (GOLDEN / method / f"{model}.json").exists()]
    return [(model, name) for model in models for name in golden_json(f"{method}/{model}")]


def golden_case(method: str, model: str, case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and the tensors (names without the case prefix) of one run of a method's own code."""
    prefix = f"{case}."
    tensors = {
        k.removeprefix(prefix): v for k, v in golden_tensors(f"{method}/{model}").items() if k.startswith(prefix)
    }
    return golden_json(f"{method}/{model}")[case], tensors


def golden_covariance(model: str, layer: int) -> torch.Tensor:
    """Second moment of the keys of one layer, [f, f], float32; stored as its upper triangle, row by row."""
    upper = golden_tensors(f"covariance/{model}")[f"layer{layer}.upper"]
    width = int((2 * upper.numel() + 0.25) ** 0.5)
    rows, columns = torch.triu_indices(width, width)
    full = torch.empty(width, width, dtype=upper.dtype)
    full[rows, columns] = upper
    full[columns, rows] = upper
    return full
