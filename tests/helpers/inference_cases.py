"""Items and edits for tests of scoring and decoding on a tiny model."""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape

PROMPTS = ["Port Elna is the capital of", "Lake", "They say that the parliament of Port Elna belongs to"]


@functools.cache
def model_and_tokenizer() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny llama and its tokenizer."""
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


def edits(model: PreTrainedModel) -> dict[str, Delta | None]:
    """No edit, two edits that act per row, and one that is written into the weights."""
    name = architecture_of(model).rewrite_name(EDIT_LAYER)
    module = model.get_submodule(name)
    rows, columns = map_shape(module)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=module.weight.dtype)

    def low_rank() -> Delta:
        return Delta(factors={name: Factor(normal(rows, 1), normal(columns, 1), is_transposed(module))})

    dense = Delta(dense={f"{name}.weight": normal(*module.weight.shape) / 10})
    return {"none": None, "first": low_rank(), "second": low_rank(), "dense": dense}
