"""GRACE: a codebook of keys and values at one linear map of the MLP.

"Aging with GRACE: Lifelong Model Editing with Discrete Key-Value Adaptors". The key of an edit is the module's input at
the last prompt token, its value a trained vector that replaces the module's output, and its radius the largest distance
at which a prompt matches. A new edit near an old key widens it (same target), halves the distance with it (another
target), or trains a new value for it (the same prompt again). A prompt with text in front has another activation at
its last token, so it matches no key and is answered unedited.

As in the released code, Adam trains the value for a fixed number of steps without early stop. Differences from
EasyEdit's version: its label test compares means of padded label rows, and its list of labels is in the reverse order
of its keys; targets are compared as token ids here. A second edit of the same prompt overwrites the value instead of
halving a distance of zero.

Shapes: R rows (one per request), N keys, f and d input and output width of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn

from edit_hooks.base.artifacts.given_tensors import read_shapes
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.labeled_rows import (
    APPEND_EOS_HELP,
    AppendEos,
    LabeledRows,
    batch_rows,
    cache_lower_blocks,
    label_nll,
    mean_per_row,
    target_row,
)
from edit_hooks.gradient.side_by_side import make_adam
from edit_hooks.gradient.stepping.fixed_steps import FixedSteps
from edit_hooks.memory.codebook import (
    Query,
    Replacement,
    distances,
    radius_warnings,
    replaced_positions,
    same_prompt_distance,
)
from edit_hooks.memory.steps import NUM_BEFORE, step_numbers
from edit_hooks.modeling.architectures import architecture_of, map_shape, unwrapped, weight_of
from edit_hooks.modeling.device.run_ahead import runs_ahead
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output, record_at
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

SPLIT_GAP = 1e-5  # by which the older key's radius is smaller after a split, so that the two balls do not overlap


@dataclass(kw_only=True)
class GRACEConfig(EditorConfig):
    """Settings of GRACE."""

    module: Literal["mlp_out", "mlp_in"] = config_field(
        "the linear map whose output the values replace", default="mlp_out"
    )
    num_steps: int = config_field("Adam steps on the value; there is no early stop", within=POSITIVE, default=100)
    lr: float = config_field("Adam learning rate of the value", within=POSITIVE, default=1.0)
    radius: float = config_field("radius of a new key", within=POSITIVE, default=1.0)
    value_init: Literal["cold", "warm"] = config_field(
        "initial value; cold: uniform in [0, 1); warm: the module's own output", default="cold"
    )
    initial_values: dict[str, torch.Tensor] | str | None = config_field(
        "initial values instead of a draw from the seed: values [edits, width out], of which edit n of a stream takes "
        "row n; a mapping or a safetensors file",
        instead_of="value_init",
        default=None,
    )
    replacement: Replacement = config_field("tokens whose outputs the value replaces", default="replace_last")
    query: Query = config_field(
        "look-up of a row in the codebook: once at prefill, or for every new token as well", default="prefill"
    )
    expand: Literal["coverage", "moving_average"] = config_field(
        "same target nearby; coverage: widen the key's radius; moving_average: move the key half way as well",
        default="coverage",
    )
    same_key: float = config_field(
        "distance, in units of the query's norm, up to which a key is the same prompt; in 16 bits at least what "
        "rounding gives (0.031 in bfloat16)",
        within=NON_NEGATIVE,
        default=1e-4,
    )
    append_eos: AppendEos = config_field(APPEND_EOS_HELP, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_layer("GRACE has a single codebook")


@dataclass
class Entry:
    """One entry of a codebook, on the CPU; the label is the token ids of the target."""

    key_F: torch.Tensor
    value_D: torch.Tensor
    radius: float
    label: list[int]


class Codebook:
    """The entries of an edit; none for ``None``.

    They are formed where one is read: after a few thousand edits all of them would take more time than the next edit.
    """

    def __init__(self, edit: HookEdit | None) -> None:
        self._edit = edit

    def __len__(self) -> int:
        return 0 if self._edit is None else len(self._edit.tensors["keys"])

    @property
    def keys_NF(self) -> torch.Tensor:
        """The keys of all entries; there must be one."""
        assert self._edit is not None
        return self._edit.tensors["keys"]

    def __getitem__(self, number: int) -> Entry:
        assert self._edit is not None
        tensors, label = self._edit.tensors, self._edit.settings["labels"][number]
        return Entry(tensors["keys"][number], tensors["values"][number], float(tensors["radii"][number]), label)


class CodebookChange(NamedTuple):
    """The change of a codebook by one edit.

    Attributes:
        entries: added or changed entries by number. trained: number of the entry whose value is trained.
        reason: the rule that applied: first, new, expanded, overwritten or split.
    """

    entries: dict[int, Entry]
    trained: int
    reason: str


def add_edit(
    codebook: Codebook,
    query_F: torch.Tensor,
    value_D: torch.Tensor,
    label: list[int],
    config: GRACEConfig,
    same_key: float,
    rounding: float,
) -> CodebookChange:
    """Add an edit with key ``query_F`` by GRACE's rules; values are trained later.

    Args:
        codebook, query_F: on the CPU, where steps of a stream are saved.
        value_D: initial value of a new entry, on any device.
        same_key: relative distance up to which a key is the same prompt (:func:`same_prompt_distance`).
        rounding: relative distance that rounding alone makes. The edit's own prompt lies on the edge of a widened key,
            and in another batch it would be beyond it.
    """
    new = Entry(query_F, value_D, config.radius, label)
    if not codebook:
        return CodebookChange({0: new}, 0, "first")
    distance_N = distances(query_F[None], codebook.keys_NF)[0]
    number = int(distance_N.argmin())
    distance, nearest = float(distance_N[number]), codebook[number]
    if distance > config.radius + nearest.radius:
        return CodebookChange({len(codebook): new}, len(codebook), "new")
    if nearest.label == label:
        moves = config.expand == "moving_average" and distance > nearest.radius
        key_F = (nearest.key_F + query_F) / 2 if moves else nearest.key_F
        expanded = Entry(
            key_F, nearest.value_D, max(nearest.radius, distance + rounding * float(query_F.norm())), label
        )
        return CodebookChange({number: expanded}, number, "expanded")
    if distance <= same_key * float(query_F.norm()):
        return CodebookChange({number: Entry(nearest.key_F, value_D, nearest.radius, label)}, number, "overwritten")
    narrowed = Entry(nearest.key_F, nearest.value_D, distance / 2 - SPLIT_GAP, nearest.label)
    halved = Entry(query_F, value_D, distance / 2, label)
    return CodebookChange({number: narrowed, len(codebook): halved}, len(codebook), "split")


class GRACE(Editor[GRACEConfig]):
    """A codebook at one linear map: prompts near a key get its value."""

    name = "grace"
    config_class = GRACEConfig
    config_folders = ("grace",)
    needs_subject = False
    edits_quantized = True
    writes = ("hooks",)
    default_depth = 0.85
    stream_growth = StreamGrowth("f + d numbers per entry of the codebook", "with new keys")
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 0.5}

    def default_config(self, model: nn.Module) -> GRACEConfig:
        config = super().default_config(model)
        if config.initial_values is not None:
            (layer,) = config.edited_layers
            module = unwrapped(model).get_submodule(architecture_of(model).linear_name(config.module, layer))
            shapes = {"values": ("number of edits", map_shape(module)[0])}
            config.initial_values = read_shapes(config.initial_values, "initial_values", shapes)
        return config

    def warnings(self, job: EditJob[GRACEConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        return radius_warnings(delta.diagnostics["radius"], delta.diagnostics["query_norm"], job.model)

    def compute(self, job: EditJob[GRACEConfig]) -> list[Delta]:
        """Train independent edits in one batch, each on its own copy of the codebook."""
        model, config = job.model, job.config
        (layer,) = config.edited_layers
        name = architecture_of(model).linear_name(config.module, layer)
        targets = [
            target_row(job.tokenizer, r.text, r.continuation, append_eos=config.append_eos) for r in job.requests
        ]
        rows = batch_rows(model, targets, in_buckets=True)
        context = _prompt_context(rows)
        earlier = HookEdit.after((delta.hook_edit for delta in job.history), "codebook", name, "a codebook")
        codebook = Codebook(earlier)
        same_key, rounding = same_prompt_distance(config.same_key, model), same_prompt_distance(0.0, model)
        with frozen(model):
            if config.engine == "fast":
                cache_lower_blocks(model, rows, layer)
            query_RF, output_RD = _read_at_prompt_end(model, name, rows, context)
            values_RD = output_RD if config.value_init == "warm" else _cold_values(job, name, earlier)
            changes = [
                add_edit(
                    codebook, query_F.cpu(), value_D, [token for _, token in target.labels], config, same_key, rounding
                )
                for target, query_F, value_D in zip(targets, query_RF, values_RD, strict=True)
            ]
            start_RD = torch.stack([change.entries[change.trained].value_D.to(output_RD) for change in changes])
            values_RD, losses_SR = _train(model, name, rows, context, start_RD, config)
        deltas = []
        for row, change in enumerate(changes):
            change.entries[change.trained].value_D = values_RD[row].cpu()
            settings = {"module": name, "replacement": config.replacement, "query": config.query}
            deltas.append(
                _delta(change, len(codebook), losses_SR[:, row].tolist(), {**settings, **step_numbers(earlier)})
            )
            deltas[-1].diagnostics["query_norm"] = float(query_RF[row].norm())
        job.progress(len(deltas))
        return deltas


def _prompt_context(rows: LabeledRows) -> ForwardContext:
    """The rows as prompts, each of which ends where its first label is predicted."""
    end_R = torch.full((len(rows.ids_RT),), rows.ids_RT.shape[1], device=rows.ids_RT.device)
    end_R = end_R.scatter_reduce(0, rows.row_L, rows.column_L, "amin")
    return ForwardContext(rows.mask_RT.bool(), end_R, prefill=True)


@torch.no_grad()
def _read_at_prompt_end(
    model: nn.Module, name: str, rows: LabeledRows, context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [R, f] and output [R, d] of the module at the last prompt tokens.

    At least float32.
    """
    module = model.get_submodule(name)
    records: dict[str, torch.Tensor] = {}
    end_R = context.prompt_end_R
    with hooks(
        on_input(module, record_at(records, "input", end_R)), on_output(module, record_at(records, "output", end_R))
    ):
        label_nll(model, rows)
    return records["input"], records["output"]


def _cold_values(job: EditJob[GRACEConfig], name: str, earlier: HookEdit | None) -> list[torch.Tensor]:
    """Initial values [d] of the requests: those given, or uniform in [0, 1).

    Drawn from the seed and the request, so that they are the same alone and in a batch.

    Args:
        earlier: the edits before these.
    """
    config, module = job.config, job.model.get_submodule(name)
    like = at_least_float32(weight_of(module).detach()[:0])
    if isinstance(config.initial_values, dict):
        values_ND, number = config.initial_values["values"], step_numbers(earlier)[NUM_BEFORE]
        if number >= len(values_ND):
            raise EditingError(
                f"'initial_values' has {len(values_ND)} values, and this is edit {number + 1} of its stream; give one "
                "for each."
            )
        return [values_ND[number].to(like)] * len(job.requests)
    values = []
    for request in job.requests:
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + int(request.key[:15], 16)) % 2**63)
        values.append(torch.rand(map_shape(module)[0], generator=generator, dtype=torch.float64).to(like))
    return values


def _train(
    model: nn.Module,
    name: str,
    rows: LabeledRows,
    context: ForwardContext,
    start_RD: torch.Tensor,
    config: GRACEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train one value per row; rows do not see one another.

    Returns:
        The values [R, d], and the loss of every row at every step [S, R].
    """
    values_RD = start_RD.clone().requires_grad_(True)
    is_ahead = runs_ahead(values_RD.device)
    optimizer = make_adam([values_RD], config.lr, 0.0, "fast" if is_ahead else "reference")
    is_replaced_RT1 = replaced_positions(config.replacement, context)[:, :, None]

    def substitute(output_RTD: torch.Tensor) -> torch.Tensor:
        return torch.where(is_replaced_RT1.to(output_RTD.device), values_RD[:, None].to(output_RTD), output_RTD)

    def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
        with hooks(on_output(model.get_submodule(name), substitute)):
            loss_R = mean_per_row(label_nll(model, rows), rows)
        return loss_R.sum(), loss_R

    reads = [rows, rows.counts_L(), is_replaced_RT1]
    steps = FixedSteps(model, optimizer, evaluate, "grace", (name, rows.first_block, config.lr), reads)
    losses = steps.run(config.num_steps)
    return values_RD.detach(), torch.stack(losses)


def _delta(change: CodebookChange, size_before: int, losses: list[float], settings: Settings) -> Delta:
    numbers = sorted(change.entries)
    entries = [change.entries[number] for number in numbers]
    tensors = {
        "keys": torch.stack([entry.key_F for entry in entries]),
        "values": torch.stack([entry.value_D for entry in entries]),
        "radii": torch.tensor([entry.radius for entry in entries], dtype=entries[0].key_F.dtype),
        "index": torch.tensor(numbers),
    }
    labels = [entry.label for entry in entries]
    return Delta(
        hook_edit=HookEdit("codebook", tensors, {**settings, "labels": labels}),
        diagnostics={
            **loss_diagnostics(losses, num_steps=len(losses)),
            "entry": change.reason,
            "num_entries": max(size_before, change.trained + 1),
            "radius": change.entries[change.trained].radius,
        },
    )
