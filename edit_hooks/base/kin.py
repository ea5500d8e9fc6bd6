"""Models that nothing is published for, and the models whose settings they take: a rule, not a search.

The settings are those of the first of the named files that an editor has, with the blocks moved to the model's depth,
as for the setting ``shipped``. The rule: another size of the same family; else a model with blocks of the same kind
and about as many of them. Such settings count as untuned wherever their origin is shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LLAMA = ("llama-3.2-3b", "llama-3-8b", "gemma-3-270m")
QWEN = ("qwen3-8b", "qwen2.5-7b", "gemma-3-270m")
GEMMA = ("gemma-3-270m",)
OLMO = ("llama-3-8b", "llama-2-7b", "gemma-3-270m")


class Kin(NamedTuple):
    """A model by the shape of its text model, and file names by preference."""

    name: str
    model_type: str
    depth: int
    width: int
    like: tuple[str, ...]


KIN = (
    Kin("Qwen3 0.6B", "qwen3", 28, 1024, QWEN),
    Kin("Qwen3 1.7B", "qwen3", 28, 2048, QWEN),
    Kin("Qwen3 4B", "qwen3", 36, 2560, QWEN),
    Kin("Qwen3 8B", "qwen3", 36, 4096, QWEN),
    Kin("Qwen3 14B", "qwen3", 40, 5120, QWEN),
    Kin("Qwen3 32B", "qwen3", 64, 5120, QWEN),
    Kin("Gemma 3 1B", "gemma3_text", 26, 1152, GEMMA),
    Kin("Gemma 3 4B", "gemma3_text", 34, 2560, GEMMA),
    Kin("Gemma 3 12B", "gemma3_text", 48, 3840, GEMMA),
    Kin("Gemma 3 27B", "gemma3_text", 62, 5376, GEMMA),
    Kin("Llama 3.2 1B", "llama", 16, 2048, LLAMA),
    Kin("Llama 3.2 3B", "llama", 28, 3072, LLAMA),
    Kin("SmolLM and SmolLM2 135M", "llama", 30, 576, LLAMA),
    Kin("SmolLM and SmolLM2 360M", "llama", 32, 960, LLAMA),
    Kin("SmolLM and SmolLM2 1.7B", "llama", 24, 2048, LLAMA),
    Kin("SmolLM3 3B", "smollm3", 36, 2048, LLAMA),
    Kin("OLMo 1B", "olmo", 16, 2048, OLMO),
    Kin("OLMo 7B", "olmo", 32, 4096, OLMO),
    Kin("OLMo 2 1B", "olmo2", 16, 2048, OLMO),
    Kin("OLMo 2 7B", "olmo2", 32, 4096, OLMO),
    Kin("OLMo 2 13B", "olmo2", 40, 5120, OLMO),
    Kin("OLMo 2 32B", "olmo2", 64, 5120, OLMO),
    Kin("OLMo 3 7B", "olmo3", 32, 4096, OLMO),
    Kin("OLMo 3 32B", "olmo3", 64, 5120, OLMO),
)


def kin_of(config: Any) -> Kin | None:
    """The row of a text model's configuration; ``None`` for all models that are not listed."""
    shape = tuple(getattr(config, name, None) for name in ("model_type", "num_hidden_layers", "hidden_size"))
    return next((kin for kin in KIN if (kin.model_type, kin.depth, kin.width) == shape), None)
