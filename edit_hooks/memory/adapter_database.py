"""A database of low-rank adapters: where a prompt's activation falls into a cluster, its nearest point's adapter acts.

The entries are those of MELO (``editors/melo.py``). A row is looked up once, at prefill, by the output of a query
module at its own last prompt token; the adapter found then acts on all its tokens, in later blocks only, so that a
look-up sees the unedited model. Rows without a match run unedited, bit for bit.

Shapes: R rows, T tokens, q query width, r rank, f and d input and output width of an adapted map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.memory.codebook import distances
from edit_hooks.modeling.hooks import hooks, on_output, record_at
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError


class Adapter(NamedTuple):
    """The update ``down_DR @ up_RF`` of one linear map."""

    up_RF: torch.Tensor
    down_DR: torch.Tensor

    def added(self, x_RTF: torch.Tensor) -> torch.Tensor:
        """What joins the map's output; one adapter [r, f], [d, r] for all rows or one per row [R, r, f], [R, d, r]."""
        return at_least_float32(x_RTF) @ self.up_RF.mT @ self.down_DR.mT


class Point(NamedTuple):
    """A prompt that was edited: its query [q] and the number of its adapters."""

    query_Q: torch.Tensor
    block: int


@dataclass
class Cluster:
    """Points near one another, all with the same target (token ids)."""

    center_Q: torch.Tensor
    radius: float
    label: list[int]
    points: list[Point]


@dataclass
class Database:
    """Clusters, and one adapter per target module for every block number."""

    clusters: list[Cluster] = field(default_factory=list)
    blocks: dict[int, list[Adapter]] = field(default_factory=dict)
    next_block: int = 0

    def hook_edit(self, settings: dict[str, Any], changed: set[int]) -> HookEdit:
        """As part of a delta: all clusters, and the adapters whose numbers are in ``changed``."""
        points = [(number, point) for number, cluster in enumerate(self.clusters) for point in cluster.points]
        tensors = {
            "centres": torch.stack([cluster.center_Q for cluster in self.clusters]),
            "radii": torch.tensor([cluster.radius for cluster in self.clusters], dtype=torch.float64),
            "points": torch.stack([point.query_Q for _, point in points]),
            "point_cluster": torch.tensor([number for number, _ in points]),
            "point_block": torch.tensor([point.block for _, point in points]),
        }
        for block in sorted(changed & self.blocks.keys()):
            for target, adapter in enumerate(self.blocks[block]):
                tensors[_name(block, target, "up")] = adapter.up_RF
                tensors[_name(block, target, "down")] = adapter.down_DR
        told = {"labels": [cluster.label for cluster in self.clusters], "next_block": self.next_block}
        return HookEdit(
            "adapter_database", {name: tensor.cpu() for name, tensor in tensors.items()}, {**settings, **told}
        )

    @classmethod
    def of(cls, hook_edit: HookEdit | None) -> Database:
        """Read back what :meth:`hook_edit` gave."""
        if hook_edit is None:
            return cls()
        tensors, settings = hook_edit.tensors, hook_edit.settings
        clusters = [
            Cluster(center_Q, radius, label, [])
            for center_Q, radius, label in zip(
                tensors["centres"], tensors["radii"].tolist(), settings["labels"], strict=True
            )
        ]
        rows = zip(tensors["points"], tensors["point_cluster"].tolist(), tensors["point_block"].tolist(), strict=True)
        for query_Q, number, block in rows:
            clusters[number].points.append(Point(query_Q, block))
        used = {point.block for cluster in clusters for point in cluster.points}
        count = len(settings["targets"])
        blocks = {
            block: [Adapter(tensors[_name(block, n, "up")], tensors[_name(block, n, "down")]) for n in range(count)]
            for block in sorted(used)
            if _name(block, 0, "up") in tensors  # a step of a stream holds its own only
        }
        return cls(clusters, blocks, settings["next_block"])


def _name(block: int, target: int, what: str) -> str:
    return f"block/{block}/{target}/{what}"


class AdapterDatabaseHooks(HookKind):
    """Rows under one or several databases.

    Settings: ``module`` (the query module), ``targets`` (the adapted modules), and those that
    :meth:`Database.hook_edit` adds.
    """

    mixes_rows: ClassVar[bool] = True

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        self._databases = [Database.of(edit) for edit in edits]
        self._block_R: torch.Tensor | None = None  # found at prefill, on the CPU; -1: none

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        target_module(model, hook_edit)
        for block in Database.of(hook_edit).blocks.values():
            for name, adapter in zip(hook_edit.settings["targets"], block, strict=True):
                module = target_module(model, HookEdit(hook_edit.kind, settings={"module": name}))
                check_width(module, name, adapter.down_DR.shape[0], adapter.up_RF.shape[1])

    @classmethod
    def compose(cls, parts: Sequence[HookEdit]) -> HookEdit:
        last = parts[-1]
        if len({tuple(part.settings["targets"]) for part in parts}) > 1:
            raise EditingError("adapters of different modules cannot be put into one database.")
        used = {f"block/{block}/" for block in last.tensors["point_block"].tolist()}
        tensors = {
            name: tensor
            for part in parts
            for name, tensor in part.tensors.items()
            if name.startswith("block/") and f"block/{name.split('/')[1]}/" in used
        }
        return HookEdit(last.kind, {**tensors, **last.tensors}, last.settings)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Also hooks on the adapted modules."""
        with super().attached(), contextlib.ExitStack() as scope:
            for number, edit in enumerate(self.edits):
                for target, name in enumerate(edit.settings["targets"]):
                    handle = self.model.get_submodule(name).register_forward_hook(self._adds(number, target))
                    scope.callback(handle.remove)
            yield

    def transform_output(self, number: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        """At the query module: look the rows up; the output stays as it is."""
        now = self.now
        if self._block_R is None or (now.prefill and len(self._block_R) != len(output_RTD)):
            self._block_R = torch.full((len(output_RTD),), -1)
        if now.prefill:
            rows = self.rows(number, len(output_RTD), output_RTD.device)
            if len(rows):
                query_QD = output_RTD[rows, now.to(output_RTD.device).prompt_end_R[rows]]
                self._block_R[rows.cpu()] = self._look_up(number, query_QD)
        return output_RTD

    def _look_up(self, number: int, query_RQ: torch.Tensor) -> torch.Tensor:
        """Block [r] of the nearest point of the nearest cluster, where the query lies within its radius; else -1."""
        clusters = self._databases[number].clusters
        centers_CQ = torch.stack([cluster.center_Q for cluster in clusters]).to(query_RQ.device)
        nearest_R = distances(query_RQ, centers_CQ).min(1)
        found = []
        for query_Q, distance, index in zip(query_RQ, *(part.tolist() for part in nearest_R), strict=True):
            cluster = clusters[index]
            if distance > cluster.radius:
                found.append(-1)
                continue
            points_PQ = torch.stack([point.query_Q for point in cluster.points]).to(query_Q.device)
            found.append(cluster.points[int(distances(query_Q[None], points_PQ)[0].argmin())].block)
        return torch.tensor(found)

    def _adds(self, number: int, target: int) -> Any:
        """The hook that adds the adapters' part to a module's output."""
        blocks = self._databases[number].blocks

        def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            assert self._block_R is not None
            own = self.rows(number, len(output), torch.device("cpu"))
            hit = own[self._block_R[own] >= 0]
            if not len(hit):
                return output
            chosen = [blocks[block][target] for block in self._block_R[hit].tolist()]
            x_RTF, place = args[0], hit.to(output.device)
            each = Adapter(*(torch.stack(parts).to(x_RTF.device) for parts in zip(*chosen, strict=True)))
            result = output.clone()
            result[place] = (at_least_float32(output[place]) + each.added(x_RTF[place])).to(output.dtype)
            return result

        return hook

    def select(self, rows: torch.Tensor) -> AdapterDatabaseHooks:
        chosen = object.__new__(AdapterDatabaseHooks)
        chosen.__dict__.update(self.__dict__)
        chosen.running = None
        if self.edit_of_row is not None:
            chosen.edit_of_row = self.edit_of_row[rows.to(self.edit_of_row.device)]
        if self._block_R is not None:
            chosen._block_R = self._block_R[rows.cpu()]
        return chosen


@torch.no_grad()
def outputs_at(model: Any, module: str, run: Any, column_R: torch.Tensor) -> torch.Tensor:
    """Output [R, q] of a module at one column per row, at least float32, while ``run()`` runs the model."""
    records: dict[str, torch.Tensor] = {}
    with hooks(on_output(model.get_submodule(module), record_at(records, module, column_R))):
        run()
    return records[module]
