"""What an adapter database holds, read from its tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.memory.adapter_database import Adapter


class Found(NamedTuple):
    """A cluster, with the queries of its points and the numbers of their adapters."""

    center_Q: torch.Tensor
    radius: float
    label: list[int]
    queries: list[torch.Tensor]
    adapter_ids: list[int]


def clusters_of(edit: HookEdit) -> list[Found]:
    """The clusters in the order in which they are looked up."""
    tensors = edit.tensors
    found = []
    for row, number in enumerate(tensors["cluster"].tolist()):
        own = [place for place, cluster in enumerate(tensors["point_cluster"].tolist()) if cluster == number]
        queries, ids = (
            [tensors["points"][place] for place in own],
            [int(tensors["point_block"][place]) for place in own],
        )
        radius, label = float(tensors["radii"][row]), edit.settings["labels"][row]
        found.append(Found(tensors["centers"][row], radius, label, queries, ids))
    return found


def adapters_of(edit: HookEdit) -> dict[int, list[Adapter]]:
    """The adapters of all targets by number."""
    targets = range(len(edit.settings["targets"]))
    return {
        number: [Adapter(*(edit.tensors[f"{part}/{target}"][row] for part in ("up", "down"))) for target in targets]
        for row, number in enumerate(edit.tensors["block"].tolist())
    }
