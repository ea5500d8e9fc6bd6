"""Positions of a model: how many its config names, and whether a table ends there."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

# Last names of tables with a row for each position: learned ones, and the fixed ones of GPT-J and CodeGen.
TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
NAMES = ("n_positions", "max_position_embeddings", "n_ctx")  # in a config, in the order in which lm-eval reads them


class Room(NamedTuple):
    """The tokens of a prompt and its answer.

    Attributes:
        max_length: their largest number.
        is_full: whether the model has no more positions, so that no larger number is of use.
    """

    max_length: int
    is_full: bool

    def remedy(self, other: str) -> str:
        """What to do about prompts that do not fit, besides something else."""
        return f"{other} (the model has no more positions)" if self.is_full else f"a larger max_length, or {other}"


def num_positions(config: Any) -> int | None:
    """The positions that the config of a model names, that of its text for one with images; ``None`` if none."""
    config = getattr(config, "text_config", None) or config
    found = (getattr(config, name, None) for name in NAMES)
    return next((int(number) for number in found if number is not None), None)


def has_position_table(model: nn.Module) -> bool:
    """Whether the model looks positions up in a table, beyond which it fails; others rotate or bias by them."""
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    names = [*embeddings, *(name for name, _ in model.named_buffers())]
    return any(name.rpartition(".")[2] in TABLES for name in names)
