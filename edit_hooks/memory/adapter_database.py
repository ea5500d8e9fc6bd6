"""A database of low-rank adapters: a prompt whose activation lies in a cluster runs with its nearest point's adapters.

The entries are those of MELO (``editors/melo.py``). A row is looked up once, at prefill, by the output of a query
module at its own last prompt token, or at the last token that is run (``query_token``). Its adapters then act on all
its tokens, in later blocks only, so the look-up sees the unedited model. Rows without a match, or whose nearest point
has no adapter, run unedited, bit for bit.

A database is three tables: clusters, their points, and the adapters of points. Edit n of a stream makes point n, and
adapters and a cluster of the same number where it makes these. A step holds the rows that it added or changed and the
numbers of those that it removed; the sum of a stream is looked up as it is.

Shapes: R rows, T tokens, Q query width, C clusters, P points, B edits with adapters, K rank, F and D input and output
width of an adapted map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from edit_hooks.memory.steps import NUM_BEFORE, STEP_NUMBERS, NumberedRows, settings_of_sum, sum_of_rows
from edit_hooks.modeling.architectures import map_shape
from edit_hooks.modeling.hooks import Registration, hooks, on_output, record_at
from edit_hooks.modeling.tensors import at_least_float32, in_widest_type
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, Range

NO_ADAPTER = -1
REMOVED_CLUSTERS, REMOVED_POINTS = "removed_clusters", "removed_points"
PARTS = ("up", "down")  # of an adapter
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
    """An edited prompt: its query vector [Q] and whether it has adapters, which have its number.

    Attributes:
        cluster: number of its cluster.
    """

    number: int
    query_Q: torch.Tensor
    cluster: int
    has_adapter: bool = True


class Cluster(NamedTuple):
    """Nearby points with the same target.

    Attributes:
        label: token ids of the target.
    """

    number: int
    center_Q: torch.Tensor
    radius: float
    label: list[int]


class ClusterPoints(NamedTuple):
    """The points of a cluster: their numbers [P] and queries [P, Q]."""

    number_P: torch.Tensor
    queries_PQ: torch.Tensor


class Database:
    """The content of an edit; none for ``None``.

    Clusters and points are formed where one is read: after a few thousand edits all of them would take more time than
    the next edit.
    """

    def __init__(self, edit: HookEdit | None) -> None:
        self._edit = edit

    def __len__(self) -> int:
        """Number of clusters."""
        return 0 if self._edit is None else len(self._edit.tensors["cluster"])

    @property
    def centers_CQ(self) -> torch.Tensor:
        """The centers of all clusters; there must be one."""
        assert self._edit is not None
        return self._edit.tensors["centers"]

    def __getitem__(self, position: int) -> Cluster:
        """The cluster at a position among the centers."""
        assert self._edit is not None
        tensors, label = self._edit.tensors, self._edit.settings["labels"][position]
        number, radius = int(tensors["cluster"][position]), float(tensors["radii"][position])
        return Cluster(number, tensors["centers"][position], radius, label)

    def points_of(self, cluster: Cluster) -> ClusterPoints:
        """The points of a cluster, in the order of their numbers."""
        assert self._edit is not None
        tensors = self._edit.tensors
        own_P = (tensors["point_cluster"] == cluster.number).nonzero()[:, 0]
        return ClusterPoints(tensors["point"][own_P], tensors["points"][own_P])


class Change(NamedTuple):
    """What an edit changes in a database.

    Attributes:
        clusters, points: added and changed ones. removed_clusters, removed_points: numbers.
        reason: the rule that applied: first, new, joined, overwritten or split.
    """

    reason: str
    clusters: list[Cluster]
    points: list[Point]
    removed_clusters: Sequence[int] = ()
    removed_points: Sequence[int] = ()

    def to_hook_edit(self, adapters: Sequence[Adapter], settings: dict[str, Any]) -> HookEdit:
        """A step of a stream.

        Args:
            adapters: those of the one new point, by target module.
        """
        clusters = sorted(self.clusters, key=lambda cluster: cluster.number)
        points = sorted(self.points, key=lambda point: point.number)
        new = [point.number for point in points if point.has_adapter]
        tensors = {
            "cluster": torch.tensor([cluster.number for cluster in clusters]),
            "centers": torch.stack([cluster.center_Q for cluster in clusters]),
            "radii": torch.tensor([cluster.radius for cluster in clusters], dtype=torch.float64),
            "point": torch.tensor([point.number for point in points]),
            "points": torch.stack([point.query_Q for point in points]),
            "point_cluster": torch.tensor([point.cluster for point in points]),
            "point_block": torch.tensor([point.number if point.has_adapter else NO_ADAPTER for point in points]),
            "block": torch.tensor(new),
        }
        for target, adapter in enumerate(adapters):
            for part, factor in zip(PARTS, adapter, strict=True):
                tensors[f"{part}/{target}"] = factor[None]
        state = {
            "labels": [cluster.label for cluster in clusters],
            REMOVED_CLUSTERS: sorted(self.removed_clusters),
            REMOVED_POINTS: sorted(self.removed_points),
        }
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        return HookEdit("adapter_database", on_host, {**settings, **state})


class AdapterDatabaseHooks(HookKind):
    """Rows under one or several databases.

    Settings: ``module`` (the query module), ``targets`` (the adapted modules), ``query_token``, ``labels`` of the
    clusters, the numbers of ``removed_clusters`` and ``removed_points``, and those of :mod:`edit_hooks.memory.steps`.
    """

    mixes_rows: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("_adapter_R",)
    schema: ClassVar[Schema] = Schema(
        Record(
            {
                "module": text,
                "targets": list_of(text),
                "labels": list_of(list_of(whole())),
                "query_token": one_of(*get_args(QueryToken)),
                REMOVED_CLUSTERS: list_of(whole()),
                REMOVED_POINTS: list_of(whole()),
                **STEP_NUMBERS,
            },
        ),
        {
            "cluster": Tensor("C", "whole", NON_NEGATIVE),
            "centers": Tensor("C Q"),
            "radii": Tensor("C", within=NON_NEGATIVE),
            "point": Tensor("P", "whole", NON_NEGATIVE),
            "points": Tensor("P Q"),
            "point_cluster": Tensor("P", "whole", NON_NEGATIVE),
            "point_block": Tensor("P", "whole", Range("the number of an adapter, or -1", least=NO_ADAPTER)),
            "block": Tensor("B", "whole", NON_NEGATIVE),
        },
        {rf"({'|'.join(PARTS)})/{INDEX}": Tensor("B _ _")},
    )

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        super().__init__(model, edits, edit_of_row)
        for edit in edits:
            if edit.settings[NUM_BEFORE]:
                raise EditingError(
                    f"the edit lacks {edit.settings[NUM_BEFORE]} earlier ones of its stream, on whose clusters and "
                    "adapters it goes on; give the whole stream."
                )
        self._adapter_R: torch.Tensor | None = None  # position of each row's adapter, looked up at prefill, on the CPU

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        super().check_content(hook_edit)
        settings, tensors = hook_edit.settings, hook_edit.tensors
        numbers = {
            name: tensors[name].tolist() for name in ("cluster", "point", "point_cluster", "point_block", "block")
        }
        clusters = numbers["cluster"]
        same_length("settings.labels", settings["labels"], len(clusters))
        if not settings["targets"]:
            raise EditingError("settings.targets is empty; the names of the adapted modules are needed.")
        require_distinct("settings.targets", settings["targets"])
        require_distinct("tensor cluster and settings.removed_clusters together", clusters + settings[REMOVED_CLUSTERS])
        require_distinct(
            "tensor point and settings.removed_points together", numbers["point"] + settings[REMOVED_POINTS]
        )
        require_distinct("tensor block", numbers["block"])
        used = {*numbers["point_cluster"]}
        if not used <= {*clusters} or (not settings[NUM_BEFORE] and used != {*clusters}) or not clusters:
            raise EditingError(f"tensor point_cluster must name each of the {len(clusters)} clusters, and no other.")
        if {*numbers["point_block"]} - {NO_ADAPTER} != {*numbers["block"]}:
            raise EditingError(
                f"tensor point_block must name each of the {len(numbers['block'])} adapters, and no other."
            )
        cls._check_adapters(hook_edit)

    @staticmethod
    def _check_adapters(hook_edit: HookEdit) -> None:
        """Check that there are adapters of every target, whose two parts fit."""
        targets, tensors = hook_edit.settings["targets"], hook_edit.tensors
        wanted = [f"{part}/{target}" for target in range(len(targets)) for part in PARTS]
        if missing := [name for name in wanted if name not in tensors]:
            raise EditingError(f"tensor {missing[0]} is missing.")
        if unknown := [name for name in tensors if name.startswith(PARTS) and name not in wanted]:
            raise EditingError(f"tensor {unknown[0]} is of no target; settings.targets has {len(targets)}.")
        for target in range(len(targets)):
            up, down = (tensors[f"{part}/{target}"] for part in PARTS)
            if up.shape[1] != down.shape[2]:
                raise EditingError(
                    f"tensor up/{target} is of rank {up.shape[1]}, tensor down/{target} of rank {down.shape[2]}."
                )

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        module = target_module(model, hook_edit)
        check_width(module, hook_edit.settings["module"], hook_edit.tensors["centers"].shape[1], map_shape(module)[1])
        for target, name in enumerate(hook_edit.settings["targets"]):
            module = target_module(model, HookEdit(hook_edit.kind, settings={"module": name}))
            up, down = (hook_edit.tensors[f"{part}/{target}"] for part in PARTS)
            check_width(module, name, down.shape[1], up.shape[2])

    @classmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """The database after the last step, without adapters that no point has any more."""
        if len({tuple(step.settings["targets"]) for step in steps}) > 1:
            raise EditingError("adapters of different modules cannot be put into one database.")
        clusters = NumberedRows.of(steps, "cluster", ("centers", "radii"), REMOVED_CLUSTERS)
        points = NumberedRows.of(steps, "point", ("points", "point_cluster", "point_block"), REMOVED_POINTS)
        factors = [f"{part}/{target}" for target in range(len(steps[0].settings["targets"])) for part in PARTS]
        adapters = NumberedRows.of(steps, "block", factors)
        settings = {
            **settings_of_sum(steps),
            "labels": clusters.entries("labels"),
            REMOVED_CLUSTERS: clusters.removed,
            REMOVED_POINTS: points.removed,
        }
        if not settings[NUM_BEFORE]:
            _require_each_other(points.rows["point_cluster"].content, clusters.numbers_N)
        rows = clusters.rows | points.rows | adapters.rows_with(points.rows["point_block"].content)
        return sum_of_rows(steps[0].kind, rows, settings)

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
        if self._adapter_R is None or (context.prefill and len(self._adapter_R) != len(output_RTD)):
            self._adapter_R = torch.full((len(output_RTD),), NO_ADAPTER)
        if context.prefill:
            rows = self.rows_of_edit(index, len(output_RTD), output_RTD.device)
            if len(rows):
                moved = context.to(output_RTD.device)
                last_text = self.edits[index].settings["query_token"] == "last_text"
                end_R = moved.text_end_R if last_text else moved.prompt_end_R
                query_RQ = output_RTD[rows, end_R[rows]]
                self._adapter_R[rows.cpu()] = self._look_up(index, query_RQ)
        return output_RTD

    def _look_up(self, index: int, query_RQ: torch.Tensor) -> torch.Tensor:
        """Position [R] of the adapter of the nearest point in the nearest cluster if the query is in its radius."""
        edit, device = self.edits[index], query_RQ.device
        database, tensors = Database(edit), edit.tensors
        nearest_R = distances(query_RQ, database.centers_CQ.to(device)).min(1)
        adapter_R = torch.full((len(query_RQ),), NO_ADAPTER)
        inside_R = nearest_R.values.to("cpu", torch.float64) <= tensors["radii"][nearest_R.indices.cpu()]
        for row in inside_R.nonzero()[:, 0].tolist():
            points = database.points_of(database[int(nearest_R.indices[row])])
            nearest = distances(query_RQ[row][None], points.queries_PQ.to(device))[0].argmin()
            block_P = tensors["point_block"][tensors["point"] == points.number_P[nearest.cpu()]]
            if int(block_P) != NO_ADAPTER:
                adapter_R[row] = (tensors["block"] == block_P).nonzero()[0, 0]
        return adapter_R

    def _adapter_hook(
        self, index: int, target: int
    ) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        """The hook that adds the output of the rows' adapters to that of a target module."""
        factors = [self.edits[index].tensors[f"{part}/{target}"] for part in PARTS]

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            assert self._adapter_R is not None
            rows = self.rows_of_edit(index, len(output), torch.device("cpu"))
            rows = rows[self._adapter_R[rows] != NO_ADAPTER]
            if not len(rows):
                return output
            x_RTF, adapter_R = args[0], self._adapter_R[rows]
            used = Adapter(*(factor[adapter_R].to(x_RTF.device) for factor in factors))
            rows = rows.to(output.device)
            result = output.clone()
            result[rows] = (at_least_float32(output[rows]) + used.output(x_RTF[rows])).to(output.dtype)
            return result

        return hook


def _require_each_other(cluster_P: torch.Tensor, number_C: torch.Tensor) -> None:
    """Refuse a whole database in which a look-up would find nothing: its steps come from files, each checked alone."""
    if not (torch.isin(cluster_P, number_C).all() and torch.isin(number_C, cluster_P).all()):
        raise EditingError(
            "the steps of an adapter database leave a cluster without a point or a point without a cluster; load all "
            "steps of one stream, in their order."
        )


@torch.no_grad()
def outputs_at(model: Any, module: str, run: Callable[[], object], column_R: torch.Tensor) -> torch.Tensor:
    """Output [R, Q] of a module at one column per row, at least float32; ``run()`` runs the model."""
    records: dict[str, torch.Tensor] = {}
    with hooks(on_output(model.get_submodule(module), record_at(records, module, column_R))):
        run()
    return records[module]
