"""Merging several changes of one weight into one: TIES and the linear mean.

All functions take changes (tau = W - W_0) of one shape and return the merged change, in the changes' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edit_hooks.utils.errors import EditingError, near_misses


def linear(changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """The weighted sum; ``density`` is of no meaning here."""
    return torch.stack([weight * change for weight, change in zip(weights, changes, strict=True)]).sum(0)


def ties(changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """TIES-Merging: trim each change to its largest entries, elect a sign per entry, average those that agree with it.

    Args:
        density: share of entries of each change that is kept, by size, over the whole matrix.
    """
    trimmed = [_largest(change, density) for change in changes]
    weighted = torch.stack([weight * change for weight, change in zip(weights, trimmed, strict=True)])
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0)
    agree = (weighted.sign() == elected) & (weighted != 0)
    scale = torch.tensor(list(weights), dtype=weighted.dtype, device=weighted.device)
    share = (agree * scale.view(-1, *[1] * (weighted.dim() - 1))).sum(0)
    return (weighted * agree).sum(0) / torch.where(share > 0, share, 1.0)


def _largest(change: torch.Tensor, density: float) -> torch.Tensor:
    """The ``density`` share of largest entries by magnitude; ties at the border go to the earlier entry."""
    count = int(density * change.numel())
    kept = change.abs().flatten().sort(descending=True, stable=True).indices[:count]
    flat = torch.zeros_like(change).flatten()
    flat[kept] = change.flatten()[kept]
    return flat.view_as(change)


MERGES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[float], float], torch.Tensor]] = {
    "ties": ties,
    "linear": linear,
}


def merged(name: str, changes: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    """Merge by a name of :data:`MERGES`."""
    if name not in MERGES:
        raise EditingError(f"unknown merge {name!r}.{near_misses(name, MERGES)} Known: {', '.join(MERGES)}.")
    return MERGES[name](changes, weights, density)
