"""Size of an update relative to the weights it is added to."""

from __future__ import annotations

import torch
from torch import nn

from edit_hooks.deltas.apply import read_parameter
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.weights import weight_norm


@torch.no_grad()
def update_norm_ratio(model: nn.Module, delta: Delta) -> float:
    """Root mean square of ||update|| / ||W|| over the edited matrices; 0 without any.

    Biases and the weights of norms are no matrices. Norms of low-rank updates come from their Gram matrices; the dense
    update is not formed.
    """
    matrices = {name: update for name, update in delta.dense.items() if update.dim() > 1}
    norms = {name.removesuffix(".weight"): float(update.norm()) for name, update in matrices.items()}
    for name, factor in delta.factors.items():
        if (parameter := f"{name}.weight") in delta.dense:
            norms[name] = float((delta.dense[parameter] + factor.update()).norm())
            continue
        gram = (factor.left.T @ factor.left) * (factor.right.T @ factor.right)
        norms[name] = max(float(gram.sum()), 0.0) ** 0.5
    squared = [(norm / weight_norm(model.get_submodule(name))) ** 2 for name, norm in norms.items()]
    return (sum(squared) / len(squared)) ** 0.5 if squared else 0.0


def largest_norm_ratio(model: nn.Module, delta: Delta) -> float:
    """Largest ||update|| / ||W|| over the edited parameters that are not zero; 0 without any.

    Forms the dense updates, masks included.
    """
    inner = unwrapped(model)
    norms = [
        (float(update.norm()), float(at_least_float32(read_parameter(inner, name)).norm()))
        for name, update in beside_weights(inner, delta).weights().items()
    ]
    return max((of_update / of_weight for of_update, of_weight in norms if of_weight), default=0.0)
