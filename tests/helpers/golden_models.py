"""Write the golden models of `tests/golden/models` as ordinary Hugging Face folders.

Their weights are a seeded draw, which takes fewer bytes than the weights. `weights.json` has the seed, each weight's
place in the generator's stream and its standard deviation; `weights.safetensors.xz` the last bits, which differ
between processors, as whole steps between neighboring float32 numbers. A checksum holds the result to the original.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from paths import GOLDEN
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file


def unpack_golden_model(name: str, folder: Path) -> Path:
    """Write one golden model as an ordinary Hugging Face folder below `folder` and return its path."""
    target = folder / name
    if not target.exists():
        weights = golden_weights(GOLDEN / "models" / name)
        shutil.copytree(GOLDEN / "models" / name, target, ignore=shutil.ignore_patterns("weights.*"))
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def golden_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights by name, float32, bit by bit those that the released code ran on."""
    recipe = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    last_bits = load_safetensors(lzma.decompress((folder / "weights.safetensors.xz").read_bytes()))
    generator = torch.Generator().manual_seed(recipe["seed"])
    end = max(place["offset"] + last_bits[name].numel() for name, place in recipe["drawn"].items())
    uniform = torch.rand(end, generator=generator)
    weights = {name: torch.full(entry["shape"], entry["value"]) for name, entry in recipe["constant"].items()}
    for name, place in recipe["drawn"].items():
        steps = last_bits[name]
        chunk = uniform[place["offset"] : place["offset"] + steps.numel()]
        weight = drawn_normal(chunk, place["std"]).view(steps.shape)
        weight[recipe["zero_rows"].get(name, [])] = 0.0
        weights[name] = (weight.view(torch.int32) + steps).view(torch.float32)
    assert weights_digest(weights) == recipe["sha256"], f"{folder.name}: the weights are not the original ones"
    return weights


def drawn_normal(uniform: torch.Tensor, std: float) -> torch.Tensor:
    """Normal numbers from uniform ones in float32, by Box and Muller on blocks of 2 x 8 as `torch.Tensor.normal_` does.

    Every function is rounded once, so that the numbers do not depend on the processor's float32 library.
    """
    first, second = uniform.view(-1, 2, 8).unbind(1)
    radius = (-2 * (1 - first).double().log().float()).double().sqrt().float()
    angle = (second * torch.tensor(2 * math.pi, dtype=torch.float32)).double()
    pairs = torch.stack([radius * angle.cos().float(), radius * angle.sin().float()], dim=1)
    return pairs.flatten() * torch.tensor(std, dtype=torch.float32)


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the names and bytes of all weights, by name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def as_stored(model_name: str, matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [out, in] as a golden model stores it, and back: the Conv1D of GPT-2 stores [in, out]."""
    config = json.loads((GOLDEN / "models" / model_name / "config.json").read_text(encoding="utf-8"))
    return matrix.T if config["model_type"] == "gpt2" else matrix
