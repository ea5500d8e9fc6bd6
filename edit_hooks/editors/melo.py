"""MELO: a low-rank adapter per edit, found again through a database of clusters in activation space.

"MELO: Enhancing Model Editing with Neuron-Indexed Dynamic LoRA". The query of a prompt is the output of an MLP input
projection at its last token; the blocks behind it hold adapters, of which a prompt uses the one of the nearest point of
the nearest cluster, or none when it lies outside the cluster's radius. A new edit near a cluster (within its radius and
``radius``) joins it when it has the same target (center: the mean; radius: as far as the farthest point, at least
``radius``), halves the distance with it when it has another (points that fall outside are forgotten), and otherwise
begins a cluster. The adapter of an edit is trained on its target alone, everything else frozen:

    output + scale * down (up x),   up ~ U(-1/sqrt(f), 1/sqrt(f)),  down = 0 at the start.

The released code keeps all adapters side by side in one LoRA of rank 2 * 350 and multiplies each factor by the root of
the number of blocks; ``scale`` is that product. Not kept from it: targets are compared by the sum of their token ids
(other targets can agree), a prompt that is edited again gets a cluster of negative radius (its adapter is replaced
here), and with cached decoding every new token is looked up anew (a row is looked up once here, by its prompt).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.memory.adapter_database import Adapter, Cluster, Database, Point, outputs_at
from edit_hooks.memory.codebook import distances
from edit_hooks.modeling.architectures import Role, architecture_of, map_shape, num_layers, weight_of
from edit_hooks.modeling.hooks import frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

SPLIT_GAP = 1e-5  # by which radii differ after a split, so that a prompt half way belongs to the newer cluster


@dataclass(kw_only=True)
class MELOConfig(EditorConfig):
    """Settings of MELO; ``layers`` are the adapted blocks."""

    modules: list[Role] = config_field("the adapted linear maps of a block", default_factory=lambda: ["mlp_in"])
    query_layer: int | None = config_field("block of the query; null: the one before the adapted ones", default=None)
    rank: int = config_field("rank of an edit's adapters", default=2)
    scale: float = config_field(
        "factor of the adapters; released: the number of blocks it makes room for", default=350.0
    )
    radius: float = config_field("radius of a new cluster, in units of the query's activations", default=0.5)
    num_steps: int = config_field("Adam steps on the adapters; there is no early stop", default=50)
    lr: float = config_field("Adam learning rate", default=1e-3)
    halve_every: int = config_field("steps after which the learning rate is halved, again and again", default=20)
    same_query: float = config_field("a center this near, in units of its norm, is the same prompt again", default=1e-4)
    append_eos: bool = config_field("train the end-of-text token after the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "scale", "radius", "num_steps", "lr", "halve_every"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if self.layers is not None:
            query = self.query_layer if self.query_layer is not None else min(self.layers, default=0) - 1
            if not 0 <= query < min(self.layers, default=0):
                raise EditingError(
                    f"query_layer={query} with layers={self.layers}: prompts are looked up in a block before the "
                    "adapted ones; give later layers, or an earlier query_layer."
                )


def add_point(clusters: list[Cluster], point: Point, label: list[int], config: MELOConfig) -> tuple[list[Cluster], str]:
    """The clusters with one more edit, and what happened: first, new, joined, overwritten or split."""
    fresh = Cluster(point.query_Q, config.radius, label, [point])
    if not clusters:
        return [fresh], "first"
    all_C = distances(point.query_Q[None], torch.stack([cluster.center_Q for cluster in clusters]).to(point.query_Q))[0]
    number = int(all_C.argmin())
    distance, near = float(all_C[number]), clusters[number]
    others = [cluster for index, cluster in enumerate(clusters) if index != number]
    if distance > near.radius + config.radius:
        return [*clusters, fresh], "new"
    if near.label == label:
        points = [*near.points, point]
        stacked_PQ = torch.stack([entry.query_Q.to(point.query_Q) for entry in points])
        center_Q = stacked_PQ.mean(0)
        radius = max(float(distances(center_Q[None], stacked_PQ).max()), config.radius)
        return [*clusters[:number], Cluster(center_Q, radius, label, points), *clusters[number + 1 :]], "joined"
    if distance <= config.same_query * float(point.query_Q.norm()):
        return [*others, dataclasses.replace(fresh, radius=near.radius)], "overwritten"
    radius = distance / 2 - SPLIT_GAP
    inside = [entry for entry in near.points if _distance(entry.query_Q, near.center_Q) <= radius]
    narrowed = [dataclasses.replace(near, radius=radius, points=inside)] if inside else []
    fresh.radius = distance / 2 + SPLIT_GAP
    return [*clusters[:number], *narrowed, *clusters[number + 1 :], fresh], "split"


def _distance(first_Q: torch.Tensor, second_Q: torch.Tensor) -> float:
    return float(distances(first_Q[None], second_Q[None].to(first_Q)))


class MELO(Editor[MELOConfig]):
    """Low-rank adapters beside the weights, one per edit, each used by prompts near the edit's own."""

    name = "melo"
    config_class = MELOConfig
    config_folders = ("melo",)
    needs_subject = False
    writes = ("hooks",)
    default_depth = 0.766
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 0.01,
        "scale": 8.0,
        "radius": 0.05,
    }

    def default_layers(self, config: Any) -> list[int]:
        """Two blocks at the depth of GPT-2 XL's 36 and 37."""
        count = num_layers(config)
        first = max(1, round(self.default_depth * (count - 1)))
        return [layer for layer in (first, first + 1) if layer < count]

    def compute(self, job: EditJob[MELOConfig]) -> list[Delta]:
        """Independent edits are trained in one batch, each beside its own copy of the database."""
        model, tokenizer, config = job.model, job.tokenizer, job.config
        arch = architecture_of(model)
        query_layer = config.query_layer if config.query_layer is not None else min(config.edited_layers) - 1
        query_name = arch.module_names("mlp_in", query_layer)[0]
        targets = [
            n for layer in config.edited_layers for role in config.modules for n in arch.module_names(role, layer)
        ]
        before = self._before(job.history, query_name, targets)
        examples = [target_row(tokenizer, r.text, r.target_new, append_eos=config.append_eos) for r in job.requests]
        rows = batch_rows(model, examples)
        with frozen(model):
            end_R = torch.tensor([example.labels[0][0] for example in examples], device=rows.ids_RT.device)
            query_RQ = outputs_at(model, query_name, lambda: label_nll(model, rows), end_R)
            if config.engine == "fast":
                cache_lower_blocks(model, rows, min(config.edited_layers))
            adapters, losses_SR = _train(model, rows, targets, job.requests, config)
        deltas = []
        for index, example in enumerate(examples):
            database = Database.from_hook_edit(before)
            adapter_id = database.next_id
            label = [token for _, token in example.labels]
            point = Point(query_RQ[index].cpu(), adapter_id)
            database.clusters, reason = add_point(database.clusters, point, label, config)
            database.adapters[adapter_id] = [Adapter(*(part[index] for part in adapter)) for adapter in adapters]
            database.next_id += 1
            losses = [float(loss_R[index]) for loss_R in losses_SR]
            deltas.append(
                Delta(
                    hook_edit=database.to_hook_edit({"module": query_name, "targets": targets}, {adapter_id}),
                    diagnostics={
                        "final_loss": losses[-1],
                        "initial_nll": losses[0],
                        "steps": len(losses),
                        "stop_reason": "steps",
                        "entry": reason,
                        "num_clusters": len(database.clusters),
                        "query_norm": float(query_RQ[index].norm()),
                        "losses": [{"loss": loss} for loss in losses],
                    },
                )
            )
        job.progress(len(deltas))
        return deltas

    @staticmethod
    def _before(history: list[Delta], query_name: str, targets: list[str]) -> HookEdit | None:
        """The database after the steps of a stream."""
        found = HookEdit.combine(delta.hook_edit for delta in history)
        if found is None:
            return None
        there = (found.kind, found.settings["module"], found.settings.get("targets"))
        if there != ("adapter_database", query_name, targets):
            raise EditingError(
                f"the edits so far are a {there[0]} at {there[1]}, not adapters of {', '.join(targets)} found through "
                f"{query_name}."
            )
        return found


def _train(
    model: Any, rows: LabeledRows, targets: list[str], requests: list[EditRequest], config: MELOConfig
) -> tuple[list[Adapter], list[torch.Tensor]]:
    """Per target the adapters of all rows (up [R, r, f], down [R, d, r], scale included) and each row's losses.

    Rows do not see one another, and Adam goes by coordinates: alone or in a batch, an edit's adapters are the same.
    """
    leaves: list[Adapter] = []
    for name in targets:
        module = model.get_submodule(name)
        width_out, width_in = map_shape(module)
        like = at_least_float32(weight_of(module).detach()[:0])
        up = torch.stack([_drawn(request, name, (config.rank, width_in), config.seed) for request in requests])
        down = torch.zeros(len(requests), width_out, config.rank)
        leaves.append(Adapter(*(part.to(like).requires_grad_(True) for part in (up, down))))

    def adds(adapter: Adapter) -> Any:
        def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return (at_least_float32(output) + config.scale * adapter.output(args[0])).to(output.dtype)

        return hook

    registrations = [
        (lambda name=name, leaf=leaf: model.get_submodule(name).register_forward_hook(adds(leaf)))
        for name, leaf in zip(targets, leaves, strict=True)
    ]
    optimizer = torch.optim.Adam([part for leaf in leaves for part in leaf], lr=config.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, config.halve_every, gamma=0.5)
    losses = []
    for _ in range(config.num_steps):
        with hooks(*registrations), torch.enable_grad():
            nll_L = label_nll(model, rows)
            loss_R = torch.zeros(len(requests), dtype=nll_L.dtype, device=nll_L.device)
            loss_R = loss_R.index_add(0, rows.row_L.to(nll_L.device), nll_L / rows.counts_L().to(nll_L.device))
        losses.append(loss_R.detach())
        optimizer.zero_grad()
        loss_R.sum().backward()
        optimizer.step()
        schedule.step()
    scaled = [Adapter(leaf.up_KF.detach(), config.scale * leaf.down_DK.detach()) for leaf in leaves]
    return scaled, losses


def _drawn(request: EditRequest, name: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """LoRA's start of the factor at the input, from the seed, the request and the module."""
    told = f"{seed} {request.key} {name}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(told).digest()[:7], "big"))
    bound = 1 / math.sqrt(shape[1])
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound
