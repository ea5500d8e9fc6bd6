"""Merge several changes of one weight into one: TIES and the linear mean.

Changes are tau = W - W_0, all of one shape; the merged change has their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edit_hooks.utils.errors import EditingError, near_misses


def linear(changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """Weighted sum. ``density`` is unused."""
    return torch.stack([weight * change for weight, change in zip(weights, changes, strict=True)]).sum(0)


def ties(changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """TIES-Merging: trim each change to its largest entries, elect a sign per entry, average the entries that agree.

    Args:
        density: share of each change's entries that survives trimming, over the whole matrix.
    """
    trimmed = [_trim(change, density) for change in changes]
    weighted = torch.stack([weight * change for weight, change in zip(weights, trimmed, strict=True)])
    elected_sign = torch.where(weighted.sum(0) >= 0, 1.0, -1.0)
    agrees = (weighted.sign() == elected_sign) & (weighted != 0)
    scale = torch.tensor(list(weights), dtype=weighted.dtype, device=weighted.device)
    total_weight = (agrees * scale.view(-1, *[1] * (weighted.dim() - 1))).sum(0)
    return (weighted * agrees).sum(0) / torch.where(total_weight > 0, total_weight, 1.0)


def _trim(change: torch.Tensor, density: float) -> torch.Tensor:
    """Zero all but the ``density`` share of entries largest in magnitude; of equal entries the earlier ones survive."""
    count = int(density * change.numel())
    largest = change.abs().flatten().sort(descending=True, stable=True).indices[:count]
    trimmed = torch.zeros_like(change).flatten()
    trimmed[largest] = change.flatten()[largest]
    return trimmed.view_as(change)


MERGES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[float], float], torch.Tensor]] = {
    "ties": ties,
    "linear": linear,
}


def merge_changes(name: str, changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """Merge with the method of this name in :data:`MERGES`."""
    if name not in MERGES:
        raise EditingError(f"unknown merge {name!r}.{near_misses(name, MERGES)} Known: {', '.join(MERGES)}.")
    return MERGES[name](changes, weights, density)
