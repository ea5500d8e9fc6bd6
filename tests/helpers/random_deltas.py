"""Random deltas of every kind for tiny models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from edit_hooks import Delta, Factor
from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape
from edit_hooks.modeling.tensors import pack_bits


def rewrite_name(model: PreTrainedModel, layer: int = EDIT_LAYER) -> str:
    """Name of the module that the deltas change."""
    return architecture_of(model).rewrite_name(layer)


def random_delta(
    model: PreTrainedModel,
    layers: Sequence[int] = (EDIT_LAYER,),
    ranks: Sequence[int] = (2,),
    seed: int = 0,
    scale: float = 0.3,
) -> Delta:
    """A low-rank delta at the rewrite modules of ``layers``."""
    generator = torch.Generator().manual_seed(seed)
    delta = Delta(meta={"editor": "test"})
    for layer, rank in zip(layers, ranks, strict=True):
        name = rewrite_name(model, layer)
        module = model.get_submodule(name)
        width_out, width_in = map_shape(module)
        left, right = (torch.randn(width, rank, generator=generator) * scale for width in (width_out, width_in))
        delta.factors[name] = Factor(left, right, is_transposed(module))
    return delta


def dense_delta(model: PreTrainedModel, layer: int = EDIT_LAYER, seed: int = 0) -> Delta:
    """A dense delta at the rewrite module of ``layer``."""
    weight = model.get_submodule(rewrite_name(model, layer)).weight
    generator = torch.Generator().manual_seed(seed)
    return Delta(dense={f"{rewrite_name(model, layer)}.weight": torch.randn(weight.shape, generator=generator) * 0.1})


def masked_delta(model: PreTrainedModel, seed: int = 0) -> Delta:
    """A low-rank delta of which about half the entries are written."""
    delta, name = random_delta(model, seed=seed), rewrite_name(model)
    mask = torch.rand(model.get_submodule(name).weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    delta.masks[name] = pack_bits(mask)
    return delta


def codebook(
    model: PreTrainedModel, radius: float = 1e6, num_entries: int = 1, first: int = 0, seed: int = 0
) -> HookEdit:
    """A codebook at the rewrite module; with a large radius every prompt is near a key."""
    generator = torch.Generator().manual_seed(seed)
    width_out, width_in = map_shape(model.get_submodule(rewrite_name(model)))
    tensors = {
        "keys": torch.randn(num_entries, width_in, generator=generator),
        "values": torch.randn(num_entries, width_out, generator=generator),
        "radii": torch.full((num_entries,), radius),
        "index": torch.arange(first, first + num_entries),
    }
    settings = {
        "module": rewrite_name(model),
        "replacement": "replace_last",
        "query": "prefill",
        "labels": [[number] for number in range(first, first + num_entries)],
        "num_before": first,
        "num_edits": first + num_entries,
    }
    return HookEdit("codebook", tensors, settings)
