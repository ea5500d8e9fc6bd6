"""A database of low-rank adapters: a prompt whose activation lies in a cluster runs with its nearest point's adapters.

The entries are those of MELO (``editors/melo.py``). A row is looked up once, at prefill, by the output of a query
module at its own last prompt token, or at the last token that is run (``query_token``). Its adapters then act on all
its tokens, in later blocks only, so the look-up sees the unedited model. Rows without a match, or whose nearest point
has no adapter, run unedited, bit for bit.

Shapes: R rows, T tokens, Q query width, C clusters, P points of a cluster, K rank, F and D input and output width of an
adapted map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import nn

from edit_hooks.deltas.hook_edit import HookEdit, HookKind, check_width, target_module
from edit_hooks.deltas.schema import (
    INDEX,
    Record,
    Schema,
    Tensor,
    list_of,
    one_of,
    require_distinct,
    same_length,
    text,
    whole,
)
from edit_hooks.memory.codebook import distances
from edit_hooks.memory.steps import NUM_BEFORE, settings_of_sum
from edit_hooks.modeling.architectures import map_shape
from edit_hooks.modeling.hooks import Registration, hooks, on_output, record_at
from edit_hooks.modeling.tensors import at_least_float32, in_widest_type
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, Range

PREFIX = "block/"  # of the adapters' tensor names in saved edits
NO_ADAPTER = -1
QueryToken = Literal["last_prompt", "last_text"]


class Adapter(NamedTuple):
    """The update ``down_DK @ up_KF`` of one linear map, or one per row with a leading dimension [R]."""

    up_KF: torch.Tensor
    down_DK: torch.Tensor

    def output(self, x_RTF: torch.Tensor) -> torch.Tensor:
        """The update's output [R, T, D], to be added to the map's; at least float32."""
        x_RTF, up_KF, down_DK = in_widest_type(x_RTF, self.up_KF, self.down_DK)
        return x_RTF @ up_KF.mT @ down_DK.mT


class Point(NamedTuple):
    """An edited prompt: its query vector [Q] and the id of its adapters, :data:`NO_ADAPTER` for none."""

    query_Q: torch.Tensor
    adapter_id: int


@dataclass
class Cluster:
    """Nearby points with the same target.

    Attributes:
        label: token ids of the target.
    """

    center_Q: torch.Tensor
    radius: float
    label: list[int]
    points: list[Point]


@dataclass
class Database:
    """Clusters, and their adapters by id: one per target module."""

    clusters: list[Cluster] = field(default_factory=list)
    adapters: dict[int, list[Adapter]] = field(default_factory=dict)
    next_id: int = 0

    def cluster_of(self, adapter_id: int) -> Cluster:
        """The cluster with the point of an adapter."""
        return next(c for c in self.clusters if any(point.adapter_id == adapter_id for point in c.points))

    def to_hook_edit(self, settings: dict[str, Any], changed: set[int]) -> HookEdit:
        """A step of a stream: all clusters, and the adapters whose ids are in ``changed``."""
        points = [(number, point) for number, cluster in enumerate(self.clusters) for point in cluster.points]
        tensors = {
            "centers": torch.stack([cluster.center_Q for cluster in self.clusters]),
            "radii": torch.tensor([cluster.radius for cluster in self.clusters], dtype=torch.float64),
            "points": torch.stack([point.query_Q for _, point in points]),
            "point_cluster": torch.tensor([number for number, _ in points]),
            "point_block": torch.tensor([point.adapter_id for _, point in points]),
        }
        for adapter_id in sorted(changed & self.adapters.keys()):
            for target, adapter in enumerate(self.adapters[adapter_id]):
                tensors[_tensor_name(adapter_id, target, "up")] = adapter.up_KF
                tensors[_tensor_name(adapter_id, target, "down")] = adapter.down_DK
        state = {"labels": [cluster.label for cluster in self.clusters], "next_block": self.next_id}
        return HookEdit(
            "adapter_database", {name: tensor.cpu() for name, tensor in tensors.items()}, {**settings, **state}
        )

    @classmethod
    def from_hook_edit(cls, hook_edit: HookEdit | None) -> Database:
        """The database of a hook edit; empty for ``None``. A step of a stream holds only the adapters it made."""
        if hook_edit is None:
            return cls()
        tensors, settings = hook_edit.tensors, hook_edit.settings
        clusters = [
            Cluster(center_Q, radius, label, [])
            for center_Q, radius, label in zip(
                tensors["centers"], tensors["radii"].tolist(), settings["labels"], strict=True
            )
        ]
        rows = zip(tensors["points"], tensors["point_cluster"].tolist(), tensors["point_block"].tolist(), strict=True)
        for query_Q, number, adapter_id in rows:
            clusters[number].points.append(Point(query_Q, adapter_id))
        adapters = {}
        for adapter_id in sorted({point.adapter_id for cluster in clusters for point in cluster.points}):
            if _tensor_name(adapter_id, 0, "up") in tensors:
                adapters[adapter_id] = [
                    Adapter(*(tensors[_tensor_name(adapter_id, target, part)] for part in ("up", "down")))
                    for target in range(len(settings["targets"]))
                ]
        return cls(clusters, adapters, settings["next_block"])


def _tensor_name(adapter_id: int, target: int, part: str) -> str:
    return f"{PREFIX}{adapter_id}/{target}/{part}"


class AdapterDatabaseHooks(HookKind):
    """Rows under one or several databases.

    Settings: ``module`` (the query module), ``targets`` (the adapted modules), ``query_token``, ``num_before``
    (:mod:`edit_hooks.memory.steps`), and those that :meth:`Database.to_hook_edit` adds.
    """

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_adapter_id_R",)
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "targets": list_of(text),
                "labels": list_of(list_of(whole())),
                "next_block": whole(),
                "query_token": one_of(*get_args(QueryToken)),
                NUM_BEFORE: whole(),
            },
        ),
        {
            "centers": Tensor("C Q"),
            "radii": Tensor("C", within=NON_NEGATIVE),
            "points": Tensor("P Q"),
            "point_cluster": Tensor("P", "whole", NON_NEGATIVE),
            "point_block": Tensor("P", "whole", Range("the number of an adapter, or -1", least=NO_ADAPTER)),
        },
        {rf"{PREFIX}{INDEX}/{INDEX}/(up|down)": Tensor("_ _")},
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        for edit in edits:
            self._check_whole(edit)
        self._databases = [Database.from_hook_edit(edit) for edit in edits]
        self._adapter_id_R: torch.Tensor | None = None  # looked up at prefill, on the CPU

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        settings, tensors = hook_edit.settings, hook_edit.tensors
        num_clusters = len(tensors["centers"])
        same_length("settings.labels", settings["labels"], num_clusters)
        if not settings["targets"]:
            raise EditingError("settings.targets is empty; the names of the adapted modules are needed.")
        require_distinct("settings.targets", settings["targets"])
        if {*tensors["point_cluster"].tolist()} != {*range(num_clusters)} or not num_clusters:
            raise EditingError(f"tensor point_cluster must name each of the {num_clusters} clusters, and no other.")
        cls._check_adapters(tensors, settings["targets"])

    @staticmethod
    def _check_adapters(tensors: Mapping[str, torch.Tensor], targets: Sequence[str]) -> None:
        """Check that every adapter has both tensors of every target, and that those of one target are alike."""
        ids = sorted({int(name.split("/")[1]) for name in tensors if name.startswith(PREFIX)})
        wanted = [
            _tensor_name(adapter_id, target, part)
            for adapter_id in ids
            for target in range(len(targets))
            for part in ("up", "down")
        ]
        if missing := [name for name in wanted if name not in tensors]:
            raise EditingError(f"tensor {missing[0]} is missing.")
        if unknown := [name for name in tensors if name.startswith(PREFIX) and name not in wanted]:
            raise EditingError(f"tensor {unknown[0]} is of no target; settings.targets has {len(targets)}.")
        for target in range(len(targets)):
            up, down = Tensor("K F"), Tensor("D K")
            sizes: dict[str, int] = {}
            for adapter_id in ids:
                up.check(name := _tensor_name(adapter_id, target, "up"), tensors[name], sizes)
                down.check(other := _tensor_name(adapter_id, target, "down"), tensors[other], sizes)
                if tensors[name].dtype != tensors[_tensor_name(ids[0], target, "up")].dtype:
                    raise EditingError(f"tensor {name} is of another type than those of other adapters.")

    @staticmethod
    def _check_whole(hook_edit: HookEdit) -> None:
        used = sorted({*hook_edit.tensors["point_block"].tolist()} - {NO_ADAPTER})
        if missing := [one for one in used if _tensor_name(one, 0, "up") not in hook_edit.tensors]:
            raise EditingError(
                f"the edit lacks adapter {missing[0]}, which an earlier step of its stream has; give the whole stream."
            )

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        module = target_module(model, hook_edit)
        check_width(module, hook_edit.settings["module"], hook_edit.tensors["centers"].shape[1], map_shape(module)[1])
        for target, name in enumerate(hook_edit.settings["targets"]):
            module = target_module(model, HookEdit(hook_edit.kind, settings={"module": name}))
            ends = f"/{target}/up", f"/{target}/down"
            ups, downs = ({t.shape for key, t in hook_edit.tensors.items() if key.endswith(end)} for end in ends)
            for width_out, width_in in itertools.product({size[0] for size in downs}, {size[1] for size in ups}):
                check_width(module, name, width_out, width_in)

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The clusters of the last step, with the adapters of all steps that its points still use."""
        last = steps[-1]
        if len({tuple(step.settings["targets"]) for step in steps}) > 1:
            raise EditingError("adapters of different modules cannot be put into one database.")
        used = set(last.tensors["point_block"].tolist())
        adapters = {
            name: tensor
            for step in steps
            for name, tensor in step.tensors.items()
            if name.startswith(PREFIX) and int(name.split("/")[1]) in used
        }
        return HookEdit(last.kind, {**adapters, **last.tensors}, settings_of_sum(steps, after="next_block"))

    def registrations(self) -> list[Registration]:
        """Also hooks on the adapted modules."""
        on_targets = [
            Registration(self.model.get_submodule(name), self._adapter_hook(index, target))
            for index, edit in enumerate(self.edits)
            for target, name in enumerate(edit.settings["targets"])
        ]
        return [*super().registrations(), *on_targets]

    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        """Look the rows up at the query module; its output is unchanged."""
        context = self.forward_context
        if self._adapter_id_R is None or (context.prefill and len(self._adapter_id_R) != len(output_RTD)):
            self._adapter_id_R = torch.full((len(output_RTD),), NO_ADAPTER)
        if context.prefill:
            rows = self.rows_of_edit(index, len(output_RTD), output_RTD.device)
            if len(rows):
                moved = context.to(output_RTD.device)
                last_text = self.edits[index].settings["query_token"] == "last_text"
                end_R = moved.text_end_R if last_text else moved.prompt_end_R
                query_RQ = output_RTD[rows, end_R[rows]]
                self._adapter_id_R[rows.cpu()] = self._look_up(index, query_RQ)
        return output_RTD

    def _look_up(self, index: int, query_RQ: torch.Tensor) -> torch.Tensor:
        """Adapter id [R] of the nearest point in the nearest cluster if the query is within its radius."""
        clusters = self._databases[index].clusters
        centers_CQ = torch.stack([cluster.center_Q for cluster in clusters]).to(query_RQ.device)
        nearest_R = distances(query_RQ, centers_CQ).min(1)
        adapter_ids = []
        for query_Q, distance, number in zip(query_RQ, *(values.tolist() for values in nearest_R), strict=True):
            cluster = clusters[number]
            if distance > cluster.radius:
                adapter_ids.append(NO_ADAPTER)
                continue
            points_PQ = torch.stack([point.query_Q for point in cluster.points]).to(query_Q.device)
            adapter_ids.append(cluster.points[int(distances(query_Q[None], points_PQ)[0].argmin())].adapter_id)
        return torch.tensor(adapter_ids)

    def _adapter_hook(
        self, index: int, target: int
    ) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        """The hook that adds the output of the rows' adapters to that of a target module."""
        adapters = self._databases[index].adapters

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            assert self._adapter_id_R is not None
            rows = self.rows_of_edit(index, len(output), torch.device("cpu"))
            rows = rows[self._adapter_id_R[rows] != NO_ADAPTER]
            if not len(rows):
                return output
            x_RTF, used = args[0], [adapters[number][target] for number in self._adapter_id_R[rows].tolist()]
            stacked = Adapter(*(torch.stack(factors).to(x_RTF.device) for factors in zip(*used, strict=True)))
            rows = rows.to(output.device)
            result = output.clone()
            result[rows] = (at_least_float32(output[rows]) + stacked.output(x_RTF[rows])).to(output.dtype)
            return result

        return hook


@torch.no_grad()
def outputs_at(model: Any, module: str, run: Callable[[], object], column_R: torch.Tensor) -> torch.Tensor:
    """Output [R, Q] of a module at one column per row, at least float32; ``run()`` runs the model."""
    records: dict[str, torch.Tensor] = {}
    with hooks(on_output(model.get_submodule(module), record_at(records, module, column_R))):
        run()
    return records[module]
