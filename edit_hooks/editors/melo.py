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

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_shapes, wrong_shape
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import StreamGrowth
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
    Adapter,
    Change,
    Cluster,
    Database,
    Point,
    QueryToken,
    outputs_at,
)
from edit_hooks.memory.codebook import distances, radius_warnings, same_prompt_distance
from edit_hooks.memory.steps import NUM_BEFORE, step_numbers
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


def add_point(
    database: Database,
    number: int,
    query_Q: torch.Tensor,
    label: list[int],
    config: MELOConfig,
    same_query: float,
    rounding: float,
) -> Change:
    """Place the query of edit ``number`` by MELO's rules.

    Args:
        database, query_Q: on the CPU, where steps of a stream are saved.
        same_query: relative distance up to which a center is the same prompt (:func:`same_prompt_distance`).
        rounding: relative distance that rounding alone makes. The farthest point of a cluster lies on its edge, and in
            another batch its prompt would be beyond it.
    """
    new, point = Cluster(number, query_Q, config.radius, label), Point(number, query_Q, number)
    if not database:
        return Change("first", [new], [point])
    distance_C = distances(query_Q[None], database.centers_CQ)[0]
    position = int(distance_C.argmin())
    distance, nearest = float(distance_C[position]), database[position]
    if distance > nearest.radius + config.radius:
        return Change("new", [new], [point])
    points = database.points_of(nearest)
    if nearest.label == label:
        queries_PQ = torch.cat([points.queries_PQ.to(query_Q), query_Q[None]])
        joined = _cluster_of(nearest, queries_PQ, config.radius, rounding)
        return Change("joined", [joined], [point._replace(cluster=nearest.number)])
    if distance <= same_query * float(query_Q.norm()):
        overwriting, gone = new._replace(radius=nearest.radius), points.number_P.tolist()
        return Change("overwritten", [overwriting], [point], [nearest.number], gone)
    radius = distance / 2 - SPLIT_GAP
    split = [nearest._replace(radius=radius), new._replace(radius=distance / 2 + SPLIT_GAP)]
    is_outside_P = distances(nearest.center_Q[None], points.queries_PQ)[0] > radius
    outside = points.number_P[is_outside_P].tolist()
    if not is_outside_P.all():
        return Change("split", split, [point], (), outside)
    # An emptied cluster still guards its neighborhood: one of its points moves to the center, without adapters.
    first, *others = outside
    guard = Point(first, nearest.center_Q, nearest.number, has_adapter=False)
    return Change("split", split, [guard, point], (), others)


def _cluster_of(cluster: Cluster, queries_PQ: torch.Tensor, min_radius: float, rounding: float) -> Cluster:
    """The cluster around the mean of its points that reaches the farthest one."""
    center_Q = queries_PQ.mean(0)
    reach_P = distances(center_Q[None], queries_PQ)[0] + rounding * queries_PQ.norm(dim=1)
    return cluster._replace(center_Q=center_Q, radius=max(float(reach_P.max()), min_radius))


class MELO(Editor[MELOConfig]):
    """Low-rank adapters, one set per edit, used by prompts near the edit's own."""

    name = "melo"
    config_class = MELOConfig
    config_folders = ("melo",)
    needs_subject = False
    edits_quantized = True
    writes = ("hooks",)
    default_depth = 0.766
    stream_growth = StreamGrowth(
        "r (f + d) numbers per adapted map and edit, and twice the width of the query (center and point)", "with edits"
    )
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
        numbers = step_numbers(history)
        number = numbers[NUM_BEFORE]
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
        deltas, database = [], Database(history)
        for index, target in enumerate(targets):
            label = [token for _, token in target.labels]
            change = add_point(database, number, query_RQ[index].cpu(), label, config, same_query, rounding)
            settings = {"module": query_name, "targets": modules, "query_token": config.query_token, **numbers}
            own_adapters = [Adapter(*(factor[index] for factor in adapter)) for adapter in adapters]
            losses = losses_SR[:, index].tolist()
            num_new = sum(cluster.number == number for cluster in change.clusters)
            diagnostics = {
                **loss_diagnostics(losses, num_steps=len(losses)),
                "entry": change.reason,
                "num_clusters": len(database) + num_new - len(change.removed_clusters),
                "radius": change.clusters[-1].radius,  # of the one with the new point
                "query_norm": float(query_RQ[index].norm()),
            }
            deltas.append(Delta(hook_edit=change.to_hook_edit(own_adapters, settings), diagnostics=diagnostics))
        job.progress(len(deltas))
        return deltas


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
