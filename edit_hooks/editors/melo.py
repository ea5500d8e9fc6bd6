"""MELO: a low-rank adapter per edit, found through clusters of activations.

"MELO: Enhancing Model Editing with Neuron-Indexed Dynamic LoRA". The query of a prompt is the output of an MLP input
projection at its last token. The blocks after it hold adapters; a prompt uses those of the nearest point of the nearest
cluster, or none if it lies outside the cluster's radius. A new edit near a cluster (within its radius plus ``radius``)
joins it if it has the same target (center: the mean; radius: up to the farthest point, at least ``radius``), halves the
distance with it if it has another (points that are then outside are dropped), and otherwise starts a cluster. The
adapters of an edit are trained on its target alone, with everything else frozen:

    output + scale * down (up x),   up ~ U(-b, b) with b = 1/sqrt(scale r),  down = 0 at the start.

The released code stores all adapters in one LoRA of 350 blocks of rank 2. It multiplies each factor by the root of the
number of blocks, which is ``scale`` in all, and its draw takes the rank of all blocks together as the fan-in. A cluster
that loses its last point stays, with a point at its center that selects no adapter.

Where the released code reads the query, at the last token of prompt, target and end of text (``query_token:
last_text``), prompts without that text miss the cluster; the default is the last prompt token. Other differences: it
compares targets by the sum of their token ids, which other targets can share; a prompt that is edited again gets a
cluster of negative radius (here its adapter is replaced); with cached decoding it looks up every new token (here a row
is looked up once); and it can train one block for a batch of edits (here each edit has its own).

Shapes: R rows (one per request), C clusters, P points, Q query width, r rank, f and d input and output width of a map.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_shapes, wrong_shape
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.labeled_rows import (
    APPEND_EOS_HELP,
    AppendEos,
    LabeledRow,
    LabeledRows,
    batch_rows,
    cache_lower_blocks,
    label_nll,
    mean_per_row,
    target_row,
)
from edit_hooks.memory.adapter_database import (
    NO_ADAPTER,
    Adapter,
    Cluster,
    Database,
    Point,
    QueryToken,
    outputs_at,
)
from edit_hooks.memory.codebook import distances, radius_warnings, same_prompt_distance
from edit_hooks.memory.steps import NUM_BEFORE
from edit_hooks.modeling.architectures import Role, architecture_of, map_shape, num_layers, unwrapped, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

SPLIT_GAP = 1e-5  # by which radii differ after a split, so that a prompt half way belongs to the newer cluster


@dataclass(kw_only=True)
class MELOConfig(EditorConfig):
    """Settings of MELO; ``layers`` are the adapted blocks."""

    modules: list[Role] = config_field("the adapted linear maps of a block", default_factory=lambda: ["mlp_in"])
    query_layer: int | None = config_field(
        "block of the query; null: the one before the adapted ones", within=NON_NEGATIVE, default=None
    )
    rank: int = config_field("rank of an edit's adapters", within=POSITIVE, default=2)
    scale: float = config_field(
        "factor of the adapters, which start within 1/sqrt(scale * rank); the release's is its number of blocks, 350",
        within=POSITIVE,
        default=350.0,
    )
    initial_factors: dict[str, torch.Tensor] | str | None = config_field(
        "input factors at the start, instead of a draw from the seed: by module [width in, edits x rank], edit n of a "
        "stream starts from the n-th block of columns; a mapping or a safetensors file",
        default=None,
    )
    query_token: QueryToken = config_field(
        "token whose activation is the query; last_prompt: the last of the prompt, last_text: the last of prompt, "
        "target and end of text (released; prompts alone do not match it)",
        default="last_prompt",
    )
    radius: float = config_field(
        "radius of a new cluster, in units of the query's activations", within=POSITIVE, default=0.5
    )
    num_steps: int = config_field("Adam steps on the adapters; there is no early stop", within=POSITIVE, default=50)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=1e-3)
    halve_every: int = config_field(
        "number of steps after which the learning rate is halved each time", within=POSITIVE, default=20
    )
    same_query: float = config_field(
        "distance, in units of the query's norm, up to which a cluster's center is the same prompt; in 16 "
        "bits at least what rounding gives (0.031 in bfloat16)",
        within=NON_NEGATIVE,
        default=1e-4,
    )
    append_eos: AppendEos = config_field(APPEND_EOS_HELP, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            first = min(self.layers, default=0)
            query = self.query_layer if self.query_layer is not None else first - 1
            if not 0 <= query < first:
                raise EditingError(
                    f"query_layer={query} with layers={self.layers}: prompts are looked up in a block before the "
                    "adapted ones; choose later layers, or an earlier query_layer."
                )


class Placement(NamedTuple):
    """The clusters after an edit, and the rule that applied.

    The rule is first, new, joined, overwritten or split.
    """

    clusters: list[Cluster]
    reason: str


def add_point(
    clusters: Sequence[Cluster],
    point: Point,
    label: list[int],
    config: MELOConfig,
    same_query: float,
    rounding: float,
) -> Placement:
    """Place the query of a new edit by MELO's rules.

    Args:
        same_query: relative distance up to which a center is the same prompt (:func:`same_prompt_distance`).
        rounding: relative distance that rounding alone makes. The farthest point of a cluster lies on its edge, and in
            another batch its prompt would be beyond it.
    """
    new = Cluster(point.query_Q, config.radius, label, [point])
    if not clusters:
        return Placement([new], "first")
    centers_CQ = torch.stack([cluster.center_Q for cluster in clusters]).to(point.query_Q)
    distance_C = distances(point.query_Q[None], centers_CQ)[0]
    number = int(distance_C.argmin())
    distance, nearest = float(distance_C[number]), clusters[number]
    before, after = clusters[:number], clusters[number + 1 :]
    if distance > nearest.radius + config.radius:
        return Placement([*clusters, new], "new")
    if nearest.label == label:
        points = [*nearest.points, point]
        return Placement([*before, _cluster_of(points, label, config.radius, rounding), *after], "joined")
    if distance <= same_query * float(point.query_Q.norm()):
        return Placement([*before, *after, dataclasses.replace(new, radius=nearest.radius)], "overwritten")
    radius = distance / 2 - SPLIT_GAP
    inside = [other for other in nearest.points if _distance(other.query_Q, nearest.center_Q) <= radius]
    points = inside or [Point(nearest.center_Q, NO_ADAPTER)]  # an emptied cluster still guards its neighborhood
    narrowed = dataclasses.replace(nearest, radius=radius, points=points)
    halved = dataclasses.replace(new, radius=distance / 2 + SPLIT_GAP)
    return Placement([*before, narrowed, *after, halved], "split")


def _cluster_of(points: list[Point], label: list[int], min_radius: float, rounding: float) -> Cluster:
    """The cluster around the mean of its points that reaches the farthest one."""
    queries_PQ = torch.stack([point.query_Q.to(points[-1].query_Q) for point in points])
    center_Q = queries_PQ.mean(0)
    reach_P = distances(center_Q[None], queries_PQ)[0] + rounding * queries_PQ.norm(dim=1)
    radius = max(float(reach_P.max()), min_radius)
    return Cluster(center_Q, radius, label, points)


def _distance(first_Q: torch.Tensor, second_Q: torch.Tensor) -> float:
    return float(distances(first_Q[None], second_Q[None].to(first_Q)))


class MELO(Editor[MELOConfig]):
    """Low-rank adapters, one set per edit, used by prompts near the edit's own."""

    name = "melo"
    config_class = MELOConfig
    config_folders = ("melo",)
    needs_subject = False
    edits_quantized = True
    writes = ("hooks",)
    default_depth = 0.766
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 0.01,
        "scale": 8.0,
        "radius": 0.05,
    }

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        """Two blocks at the depth of GPT-2 XL's 36 and 37."""
        count = num_layers(model_config)
        first = max(1, round(self.default_depth * (count - 1)))
        return [layer for layer in (first, first + 1) if layer < count]

    def default_config(self, model: nn.Module) -> MELOConfig:
        config = super().default_config(model)
        if config.initial_factors is not None:
            modules = architecture_of(model).all_module_names(config.modules, config.edited_layers)
            config.initial_factors = _read_factors(config.initial_factors, unwrapped(model), modules, config.rank)
        return config

    def num_tokens_past_target(self) -> int:
        """Also the last token, which holds the query."""
        return super().num_tokens_past_target() + (self.overrides.get("query_token") == "last_text")

    def warnings(self, job: EditJob[MELOConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        return radius_warnings(delta.diagnostics["radius"], delta.diagnostics["query_norm"], job.model)

    def compute(self, job: EditJob[MELOConfig]) -> list[Delta]:
        """Train independent edits in one batch, each on its own copy of the database."""
        model, config = job.model, job.config
        arch = architecture_of(model)
        first_layer = min(config.edited_layers)
        query_layer = config.query_layer if config.query_layer is not None else first_layer - 1
        query_name = arch.module_names("mlp_in", query_layer)[0]
        modules = arch.all_module_names(config.modules, config.edited_layers)
        same_query, rounding = same_prompt_distance(config.same_query, model), same_prompt_distance(0.0, model)
        history = _database_after(job.history, query_name, modules, config.query_token)
        number = 0 if history is None else history.settings["next_block"]
        leaves = [_initial_adapter(model, name, job.requests, number, config) for name in modules]
        targets = [_target_row(job.tokenizer, request, config) for request in job.requests]
        rows = batch_rows(model, targets)
        with frozen(model):
            ends = [len(t.ids) - 1 if config.query_token == "last_text" else t.labels[0][0] for t in targets]
            end_R = torch.tensor(ends, device=rows.ids_RT.device)
            query_RQ = outputs_at(model, query_name, lambda: label_nll(model, rows), end_R)
            if config.engine == "fast":
                cache_lower_blocks(model, rows, first_layer)
            adapters, losses_SR = _train(model, rows, dict(zip(modules, leaves, strict=True)), config)
        deltas = []
        for index, target in enumerate(targets):
            database = Database.from_hook_edit(history)
            own_adapters = [Adapter(*(factor[index] for factor in adapter)) for adapter in adapters]
            label = [token for _, token in target.labels]
            reason = _add_edit(database, query_RQ[index].cpu(), label, own_adapters, config, same_query, rounding)
            settings = {"module": query_name, "targets": modules, "query_token": config.query_token, NUM_BEFORE: number}
            losses = losses_SR[:, index].tolist()
            diagnostics = {
                **loss_diagnostics(losses, num_steps=len(losses)),
                "entry": reason,
                "num_clusters": len(database.clusters),
                "radius": database.cluster_of(database.next_id - 1).radius,
                "query_norm": float(query_RQ[index].norm()),
            }
            hook_edit = database.to_hook_edit(settings, {database.next_id - 1})
            deltas.append(Delta(hook_edit=hook_edit, diagnostics=diagnostics))
        job.progress(len(deltas))
        return deltas


def _add_edit(
    database: Database,
    query_Q: torch.Tensor,
    label: list[int],
    adapters: list[Adapter],
    config: MELOConfig,
    same_query: float,
    rounding: float,
) -> str:
    """Add an edit's point and adapters to the database; returns the rule that applied."""
    point = Point(query_Q, database.next_id)
    database.clusters, reason = add_point(database.clusters, point, label, config, same_query, rounding)
    database.adapters[point.adapter_id] = adapters
    database.next_id += 1
    return reason


def _target_row(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: MELOConfig) -> LabeledRow:
    """The row of a request; the query at the end of the text needs its last token, too."""
    feed_last = config.query_token == "last_text"
    return target_row(tokenizer, request.text, request.continuation, append_eos=config.append_eos, feed_last=feed_last)


def _database_after(
    history: Sequence[Delta], query_name: str, modules: list[str], query_token: QueryToken
) -> HookEdit | None:
    """The database after the steps of a stream."""
    edit = HookEdit.combine(delta.hook_edit for delta in history)
    if edit is None:
        return None
    if (edit.kind, edit.settings["module"], edit.settings.get("targets")) != ("adapter_database", query_name, modules):
        raise EditingError(
            f"the earlier edits are a {edit.kind} at {edit.settings['module']}, not adapters of {', '.join(modules)} "
            f"found through {query_name}; a stream has one editor and one configuration throughout."
        )
    if (earlier := edit.settings["query_token"]) != query_token:
        raise EditingError(
            f"query_token is {query_token!r}, but the earlier edits are found by {earlier!r}; a stream has one "
            "configuration throughout."
        )
    return edit


# -- training ----------------------------------------------------------------------------------------------------------


def _train(
    model: PreTrainedModel, rows: LabeledRows, leaves: Mapping[str, Adapter], config: MELOConfig
) -> tuple[list[Adapter], torch.Tensor]:
    """Train the adapters of all rows together.

    Rows do not see one another, and Adam is elementwise, so an edit's adapters are the same alone and in a batch.

    Args:
        leaves: the leaf tensors of each adapted module.

    Returns:
        By module the adapters of all rows (up [R, r, f], down [R, d, r], scale included), and the loss of every row at
        every step [S, R].
    """
    registrations = [_add_output(model.get_submodule(name), leaf, config.scale) for name, leaf in leaves.items()]
    optimizer = torch.optim.Adam([factor for leaf in leaves.values() for factor in leaf], lr=config.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, config.halve_every, gamma=0.5)
    losses = []
    for _ in range(config.num_steps):
        with hooks(*registrations), torch.enable_grad():
            loss_R = mean_per_row(label_nll(model, rows), rows)
        losses.append(loss_R.detach())
        optimizer.zero_grad()
        loss_R.sum().backward()
        optimizer.step()
        schedule.step()
    adapters = [Adapter(leaf.up_KF.detach(), config.scale * leaf.down_DK.detach()) for leaf in leaves.values()]
    return adapters, torch.stack(losses)


def _initial_adapter(
    model: PreTrainedModel, name: str, requests: Sequence[EditRequest], number: int, config: MELOConfig
) -> Adapter:
    """Leaf tensors of one module's adapters for all requests, each of them edit ``number`` of its stream."""
    module = model.get_submodule(name)
    width_out, width_in = map_shape(module)
    like = at_least_float32(weight_of(module).detach()[:0])
    if isinstance(config.initial_factors, dict):
        up = _given_up(config.initial_factors[name], name, config.rank, number).expand(len(requests), -1, -1)
    else:
        bound = 1 / math.sqrt(config.scale * config.rank)
        shape = (config.rank, width_in)
        up = torch.stack([_initial_up(request, name, shape, bound, config.seed) for request in requests])
    down = torch.zeros(len(requests), width_out, config.rank)
    return Adapter(*(factor.to(like).clone().requires_grad_(True) for factor in (up, down)))


def _initial_up(request: EditRequest, name: str, shape: tuple[int, int], bound: float, seed: int) -> torch.Tensor:
    """The input factor at the start, uniform within a bound, from the seed, the request and the module."""
    identity = f"{seed} {request.key} {name}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(identity).digest()[:7], "big"))
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def _given_up(factors: torch.Tensor, name: str, rank: int, number: int) -> torch.Tensor:
    """The input factor [r, f] of edit ``number`` of a stream, from those of all edits."""
    start = number * rank
    if start + rank > factors.shape[1]:
        raise EditingError(
            f"'initial_factors' of {name} has {factors.shape[1]} columns, enough for {factors.shape[1] // rank} edits "
            f"of rank {rank}, and this is edit {number + 1} of its stream."
        )
    return factors[:, start : start + rank].T


def _read_factors(
    source: Mapping[str, torch.Tensor] | str, model: nn.Module, modules: Sequence[str], rank: int
) -> dict[str, torch.Tensor]:
    """The factors of the adapted modules, from a mapping or a file.

    Raises:
        EditingError: for unreadable files, missing modules, and factors of another width, type or rank.
    """
    shapes = {name: (map_shape(model.get_submodule(name))[1], f"number of edits * {rank}") for name in modules}
    factors = read_shapes(source, "initial_factors", shapes)
    for name, factor in factors.items():
        if factor.shape[1] < rank:
            raise wrong_shape(factor, name, shapes[name], "initial_factors")
    return factors


def _add_output(module: nn.Module, adapter: Adapter, scale: float) -> Registration:
    """Register a hook that adds ``scale`` times the adapter's output."""

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return (at_least_float32(output) + scale * adapter.output(args[0])).to(output.dtype)

    return Registration(module, hook)
