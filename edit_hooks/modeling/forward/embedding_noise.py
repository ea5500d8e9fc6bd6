"""Gaussian noise on the input embeddings of subject, relation or all tokens.

Noise is added to the output of the embedding module, so it is in the units in which a family passes embeddings on
(Gemma 3 scales them inside the module). Shapes: R rows, T tokens, P perturbed tokens, d embedding width.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from edit_hooks.modeling.hooks import hooks, on_output
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import Encoding, tokens_in_span
from edit_hooks.state_reading import Drift

SAMPLED_EMBEDDINGS = 4096


def drift_positions(encoding: Encoding, subject_span: tuple[int, int]) -> dict[Drift, list[int]]:
    """Token positions that each kind of drift perturbs.

    ``relation`` is every token outside the subject; special tokens, which cover no character, belong to ``all`` only.

    Args:
        subject_span: characters [start, end) of the subject.
    """
    visible = [i for i, (start, end) in enumerate(encoding.offsets) if start < end]
    inside = set(tokens_in_span(encoding, subject_span))
    subject, relation = [i for i in visible if i in inside], [i for i in visible if i not in inside]
    return {"subject": subject, "relation": relation, "all": list(range(len(encoding.ids)))}


def generator_of(seed: str) -> torch.Generator:
    """A generator on the CPU that is seeded with a text."""
    digest = hashlib.sha256(seed.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@torch.no_grad()
def embedding_std(model: Any) -> float:
    """Standard deviation of the entries of the embedding module's outputs, over tokens of the whole vocabulary."""
    embedding = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    tokens = torch.arange(0, size, max(1, size // SAMPLED_EMBEDDINGS), device=embedding.weight.device)
    return float(at_least_float32(embedding(tokens)).std())


def gaussian_noise(
    shape: Sequence[int], std: float, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Draw N(0, std^2) noise on the CPU.

    The numbers depend on the generator, the shape and the dtype only.
    """
    return std * torch.randn(*shape, dtype=dtype, generator=generator)


def noise_at(positions: Sequence[int], num_tokens: int, noise_PD: torch.Tensor) -> torch.Tensor:
    """Spread noise over a row, [.., P, d] -> [.., T, d]; other positions are zero."""
    noise_TD = noise_PD.new_zeros(*noise_PD.shape[:-2], num_tokens, noise_PD.shape[-1])
    noise_TD[..., list(positions), :] = noise_PD
    return noise_TD


@contextlib.contextmanager
def noisy_embeddings(model: Any, noise_RTD: torch.Tensor | None) -> Iterator[None]:
    """Add noise to the input embeddings of forward passes; ``None`` adds nothing.

    Passes over fewer than T columns get the noise of the first ones.
    """
    if noise_RTD is None:
        yield
        return

    def add(hidden_RSD: torch.Tensor) -> torch.Tensor:
        return hidden_RSD + noise_RTD[:, : hidden_RSD.shape[1]].to(hidden_RSD)

    with hooks(on_output(model.get_input_embeddings(), add)):
        yield
