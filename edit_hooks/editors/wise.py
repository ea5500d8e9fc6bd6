"""WISE: edits in a copy of one weight, to which matching prompts are routed.

"WISE: Rethinking the Knowledge Memory for Lifelong Model Editing of Large Language Models". The copy (a side memory) is
trained by plain gradient descent on a random part of its entries. In addition to the loss on the target, margins push
the distance between the outputs of copy and original up on the edit and down on an unrelated text, so that a threshold
separates them (:mod:`edit_hooks.memory.side_memory` routes). After ``save_every`` edits the copy is stored and a new
one started; after ``merge_every`` edits the stored ones are merged.

Choices that follow the released code (EasyEdit) and not the paper: distances are taken after the activation function
(the paper's is ``distance: plain``), the mean over a target's tokens counts one token more (``target_mean: released``;
``plain`` does not), weight decay shrinks the whole copy, trained or not (``decayed_entries: all``; 35,000 steps leave
0.70 of it), and the early stop compares the last two losses that were followed by a step.

Differences from the release: padding is in no mean, biases are applied on every family, every row is routed separately,
evaluation never merges, a chat prompt begins with one BOS (two there, where the template writes one), and unrelated
texts are drawn from ``loc_prompts`` (there the n-th edit has the n-th question of a file).
With ``retrieve: false`` a merged memory has the smallest threshold of its parts; the release compares with that of the
current memory, which is infinite after each storing.

Shapes: R rows (the context templates, then the unrelated text), T tokens, L labels.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, StreamGrowth, dense_bytes, low_rank_footprint, training_work
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    LabeledRows,
    batch_rows,
    target_row,
)
from edit_hooks.gradient.map_forward import MAP_ENGINES, MapForward, past_distances
from edit_hooks.gradient.side_by_side import memory_budget
from edit_hooks.locate.context_templates import check_templates, num_templates, resolved_templates, warn_of_english
from edit_hooks.memory.replay import Replay, mean_positive
from edit_hooks.memory.schedule import Schedule
from edit_hooks.memory.side_memory import (
    Decide,
    Distance,
    Memory,
    MemoryBank,
    activation_shift,
    output_with_delta,
    row_distance,
    shrunk,
)
from edit_hooks.memory.steps import NUM_BEFORE
from edit_hooks.memory.unrelated_texts import UNRELATED_TEXTS, draw_texts
from edit_hooks.modeling.architectures import architecture_of, is_transposed, unwrapped, weight_of
from edit_hooks.modeling.device.run_ahead import LateScalars
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode, tokenizer_chat_context
from edit_hooks.modeling.weights import read_weight
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE, POSITIVE_SHARE

# A run ends after a loss of at most STOP_LOSS that changed by at most STOP_CHANGE, and one more step.
STOP_CHANGE, STOP_LOSS = 1e-4, 0.02


CHAT_WARNING = (
    "edits are made in the tokenizer's chat template, as released for this model (chat: auto), and questions in the "
    "context of the run: ask with --apply_chat_template, or edit the bare prompt with editor_args=chat:false."
)


@dataclass(kw_only=True)
class WISEConfig(EditorConfig):
    """Settings of WISE; the defaults are those of EasyEdit's file for Llama-2-7B."""

    append_eos: bool = config_field("append the end-of-text token to the target", default=False)
    module: Literal["mlp_out", "mlp_in"] = config_field("the linear map that gets side memories", default="mlp_out")
    num_steps: int = config_field("largest number of loss evaluations of an edit", within=POSITIVE, default=70)
    lr: float = config_field("step size of the gradient descent", within=POSITIVE, default=1.0)
    # Margins may be negative: a term of the loss is then zero until a distance is that far off.
    alpha: float = config_field("margin: bound above the distance on the unrelated text", default=5.0)
    beta: float = config_field("margin: bound below the distance on the edit", default=20.0)
    gamma: float = config_field(
        "margin: least difference between the edit's and the unrelated text's distance",
        default=10.0,
    )
    act_ratio: float = config_field(
        "a memory is used if a prompt's distance reaches this share of its threshold", within=POSITIVE, default=0.88
    )
    mask_ratio: float = config_field(
        "share of the entries that a memory may change", within=POSITIVE_SHARE, default=0.2
    )
    norm_constraint: float | None = config_field(
        "radius of the l-infinity ball around the original weight; null: none", within=POSITIVE, default=1.0
    )
    weight_decay: float = config_field("L2 penalty", within=NON_NEGATIVE, default=1e-5)
    decayed_entries: Literal["all", "trained"] = config_field(
        "entries that weight decay shrinks; all: the whole copy (released); trained: those that it may change",
        default="all",
    )
    target_mean: Literal["released", "plain"] = config_field(
        "released: a target of m tokens is divided by m + 1; plain: by m", default="released"
    )
    distance: Distance = config_field(
        "outputs compared by the distance; activation: after the activation function (released); plain: before (paper)",
        default="activation",
    )
    context_templates: list[str] | str = config_field(
        "texts with {} for the prompt, each one training row: a list, or the name of a set that the model samples",
        default="wise_11",
    )
    loc_prompts: list[str] | str = config_field(
        "unrelated texts (question and answer), one of which each edit is trained to leave alone: a list, or the path "
        "of a benchmark's records with 'loc' and 'loc_ans' (released: MEND's zsre_mend_train.json)",
        default_factory=lambda: list(UNRELATED_TEXTS),
    )
    num_loc_prompts: int = config_field(
        "number of texts drawn from a file of 'loc_prompts', by the seed", within=POSITIVE, default=100
    )
    chat: bool | Literal["auto"] = config_field(
        "make the edit in the tokenizer's chat template, with one space before the target (released; edit_context=chat "
        "has the white space that the template writes); auto: where there is a template and no other context",
        default=False,
    )
    save_every: int = config_field(
        "number of edits after which a memory is stored and a new one started", within=POSITIVE, default=500
    )
    merge_every: int = config_field(
        "number of edits after which stored memories are merged; a multiple of save_every",
        within=POSITIVE,
        default=1000,
    )
    retrieve: bool = config_field(
        "merge each group of stored memories into one and select among the groups; false: merge all into one",
        default=True,
    )
    merge: Literal["ties", "linear"] = config_field(
        "merge rule; ties: trim, elect signs, disjoint mean; linear: weighted sum", default="ties"
    )
    merge_density: float = config_field(
        "merge=ties: share of the entries that survive trimming", within=POSITIVE_SHARE, default=0.53
    )
    replay: bool = config_field(
        "after a merge, training steps also keep merged edits out of the memory and recent ones in it; needs retrieve",
        default=False,
    )
    decide: Decide = config_field(
        "routing; prompt: once per row, by its prompt; every_call: in every forward pass, by its tokens (released)",
        default="prompt",
    )
    max_over: int | None = config_field(
        "number of tokens above which the largest token distance counts instead of the mean; null: never",
        within=NON_NEGATIVE,
        default=100,
    )
    mask: Any = config_field(
        "mask of the trained entries (bool, shape of the weight); null: random, with share mask_ratio", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_templates(self.context_templates)
        if self.merge_every % self.save_every:
            raise EditingError(
                f"merge_every={self.merge_every} is not a multiple of save_every={self.save_every}; only stored "
                "memories can be merged."
            )
        if self.replay and not self.retrieve:
            raise EditingError(
                "replay=true keeps merged edits out of the current memory, which needs retrieve=true: with "
                "retrieve=false there is one memory for all. Drop one of the two."
            )
        if not self.loc_prompts:
            raise EditingError("editor setting 'loc_prompts' is empty; give at least one unrelated text.")
        self.require_one_layer("WISE has side memories of a single weight")

    @property
    def schedule(self) -> Schedule:
        """When memories are stored and merged."""
        return Schedule(self.save_every, self.merge_every, self.retrieve, self.merge, self.merge_density)


class WISE(Editor[WISEConfig]):
    """Side memories of one weight, to which matching prompts are routed."""

    name = "wise"
    config_class = WISEConfig
    config_folders = ("wise",)
    needs_subject = False
    edits_quantized = True
    writes = ("hooks",)
    feeds_last_token = True
    default_depth = 0.85
    stream_growth = StreamGrowth(
        "the masked entries of the weight per memory, which every step stores for the current one",
        "until memories merge",
    )
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 0.3,
        "mask_ratio": 0.5,
        "act_ratio": 0.5,
        "alpha": 0.5,
        "beta": 4.0,
        "gamma": 2.0,
        "context_templates": ["{}", "The band released. {}"],
        "loc_prompts": ["The museum in Karsk shows paintings."],
    }

    def default_config(self, model: nn.Module) -> WISEConfig:
        config = super().default_config(model)
        if isinstance(config.loc_prompts, str):
            config.loc_prompts = draw_texts(config.loc_prompts, config.num_loc_prompts, config.seed)
        return config

    def fill_sampled_settings(
        self, config: WISEConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> WISEConfig:
        texts = resolved_templates(config.context_templates, model, tokenizer, config.seed)
        return dataclasses.replace(config, context_templates=texts)

    def drawn_settings(self, model: nn.Module) -> dict[str, Any]:
        file = self.overrides.get("loc_prompts")
        return super().drawn_settings(model) | ({"loc_prompts": file} if isinstance(file, str) else {})

    def known_contexts(self, model: PreTrainedModel | None = None) -> list[str]:
        templates = self.overrides.get("context_templates")
        return templates if isinstance(templates, list) else []

    def warnings(self, job: EditJob[WISEConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        warn_of_english(job.config.context_templates, requests, self.name)
        in_chat = any(chat_by_default(job.tokenizer, request, job.config) for request in requests)
        return [CHAT_WARNING] if in_chat else []

    def footprint(self, config: WISEConfig, model: nn.Module) -> Footprint:
        """The change, its start, its gradient and the step in float32, the mask; of 16-bit weights a float32 copy."""
        (layer,) = config.edited_layers
        name = architecture_of(model).linear_name(config.module, layer)
        dense = dense_bytes(model, [name])
        copies = (6 if weight_of(model.get_submodule(name)).dtype == torch.float32 else 7) * dense
        rest = low_rank_footprint(model, [name], [layer], config)
        rows = num_templates(config.context_templates) + 1  # and the unrelated text
        return dataclasses.replace(
            rest,
            copies=copies + dense // 4,
            activations=rows * rest.activations,
            update=int(dense * config.mask_ratio) + dense // 32,
            work=training_work(model, first=layer, steps=config.num_steps, trained=dense, rows=rows),
        )

    def compute(self, job: EditJob[WISEConfig]) -> list[Delta]:
        (layer,) = job.config.edited_layers
        name = architecture_of(job.model).linear_name(job.config.module, layer)
        history = HookEdit.after((delta.hook_edit for delta in job.history), "side_memory", name, "side memories")
        deltas = []
        with frozen(job.model):
            for request in job.requests:
                bank = MemoryBank.from_hook_edit(history, read_weight(job.model.get_submodule(name)))
                if job.config.replay and len(bank.past.rows) < bank.num_edits:
                    raise EditingError(
                        "replay=true, but the earlier edits of this stream were made with replay=false and did not "
                        "store their texts; start the stream again, or continue it with replay=false."
                    )
                deltas.append(_edit(job, request, bank, name))
                job.progress(1)
        return deltas


def _edit(job: EditJob[WISEConfig], request: EditRequest, bank: MemoryBank, name: str) -> Delta:
    """Train the current memory on one request and add the edit to the bank."""
    model, config = job.model, job.config
    weight = read_weight(model.get_submodule(name))
    memory = bank.current or _new_memory(weight, bank, config)
    placed = training_rows(job.tokenizer, request, config)
    replay = None
    if config.replay:
        bank.past.add([row.ids for row in placed[:-1]])
        budget = memory_budget(model) if config.engine == "fast" else 0
        distance = past_distances(model, name, bank.past.rows, activation_of(model, config), budget)
        draws = random.Random(config.seed + int(request.key[:16], 16))
        replay = Replay(bank.past, config.merge_every, distance, draws)
    result = train(model, name, batch_rows(model, placed), memory, config, replay)
    memory.change, memory.shrink, memory.radius = result.change, result.shrink, config.norm_constraint
    memory.threshold = min(memory.threshold, result.distance_in) if bank.current else result.distance_in
    num_before, changed = bank.num_edits, config.schedule.add_edit(bank, memory)
    settings = {
        "module": name,
        "shape": list(weight.shape),
        "act_ratio": config.act_ratio,
        "activation": activation_of(model, config),
        "decide": config.decide,
        "max_over": config.max_over,
        NUM_BEFORE: num_before,
    }
    diagnostics = {
        "final_loss": result.losses[-1]["loss"],
        "initial_nll": result.losses[0]["nll"],
        "final_nll": result.losses[-1]["nll"],
        "steps": result.steps,
        "stop_reason": "loss" if result.stopped else "steps",
        "distance_in": result.distance_in,
        "distance_out": result.distance_out,
        "threshold": memory.threshold,
        "memories": len(bank.memories),
        "update_norm_ratio": float(memory.change.norm()) / float(at_least_float32(weight).norm()),
        "losses": result.losses,
    }
    if bank.num_edits % config.merge_every == 0:
        diagnostics["merged"] = True
    return Delta(hook_edit=bank.to_hook_edit(settings, changed), diagnostics=diagnostics)


# -- training data -----------------------------------------------------------------------------------------------------


def training_rows(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: WISEConfig) -> list[LabeledRow]:
    """The edit in every context template, and last an unrelated text.

    The whole target is fed: a row's distance is a mean over all its tokens. The unrelated text has no labels; the
    request selects it.
    """
    unrelated = config.loc_prompts[int(request.key[:8], 16) % len(config.loc_prompts)]
    if config.chat is True or chat_by_default(tokenizer, request, config):
        # As released: the space of plain text, also behind a header that ends in white space.
        request = request.in_context(dataclasses.replace(tokenizer_chat_context(tokenizer), separator=request.seam))
    placed = [request.in_template(template) for template in config.context_templates]
    rows = []
    for edit in placed:
        row = target_row(tokenizer, edit.text, edit.continuation, append_eos=config.append_eos)
        # Without a label for the end of the text, the last target token would not be fed.
        rows.append(row if config.append_eos else row._replace(ids=[*row.ids, row.labels[-1][1]]))
    return [*rows, LabeledRow(encode(tokenizer, unrelated).ids, [])]


def chat_by_default(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: WISEConfig) -> bool:
    """Whether ``chat: auto`` puts the edit in the chat template."""
    return config.chat == "auto" and bool(tokenizer.chat_template) and request.context is None


def activation_of(model: nn.Module, config: WISEConfig) -> str | None:
    """Name of the MLP's activation function.

    ``None`` if distances are taken before it.
    """
    if config.distance == "plain":
        return None
    model_config = unwrapped(model).config
    names = [getattr(model_config, key, None) for key in ("hidden_activation", "hidden_act", "activation_function")]
    return next(str(name) for name in names if name)


# -- training ----------------------------------------------------------------------------------------------------------


class TrainingResult(NamedTuple):
    """Result of training one edit.

    Attributes:
        change: W' - W, in the stored orientation. shrink: as in :class:`Memory`.
        losses: of every evaluation. steps: updates made. stopped: whether the early stop ended the run.
        distance_in, distance_out: last distances, mean over the edit's rows and of the unrelated row.
    """

    change: torch.Tensor
    shrink: float
    losses: list[dict[str, float]]
    steps: int
    stopped: bool
    distance_in: float
    distance_out: float


class _Losses(NamedTuple):
    """One evaluation: scalar ``nll`` and ``margin``, and the rows' distances [R]."""

    nll: torch.Tensor
    margin: torch.Tensor
    distance_R: torch.Tensor


def train(
    model: nn.Module,
    name: str,
    rows: LabeledRows,
    memory: Memory,
    config: WISEConfig,
    replay: Replay | None = None,
) -> TrainingResult:
    """Train the masked entries of the copy by gradient descent.

    Args:
        rows: the edit's rows, and last the unrelated one, which has no labels.
        memory: the copy before the edit; unchanged.
        replay: margins on past edits, added to the loss of every step.
    """
    weight = at_least_float32(read_weight(model.get_submodule(name)))
    forward = MAP_ENGINES[config.engine](model, rows, name)
    change, shrink, mask = memory.change.clone().requires_grad_(True), memory.shrink, memory.mask
    history: list[dict[str, float]] = []
    late: LateScalars | None = None
    steps, stopped = 0, False
    for _ in range(config.num_steps):
        if late is not None:
            history.append(late.read())
        # As released: of the losses that a step followed, so the present one does not count.
        stopped = has_converged([record["loss"] for record in history])
        losses = _evaluate(model, name, rows, forward, change, config)
        loss = losses.nll + losses.margin.to(losses.nll.device)
        parts = {"loss": loss, "nll": losses.nll, "margin": losses.margin}
        if replay is not None and not stopped:
            parts["replay"] = replay.loss(change)
            parts["loss"] = loss = loss + parts["replay"].to(loss.device)
        late = LateScalars(parts)
        if stopped:
            break
        (gradient,) = torch.autograd.grad(loss, change)
        with torch.no_grad():
            change -= config.lr * (gradient + config.weight_decay * (weight + change)) * mask
            if config.norm_constraint is not None:
                change.clamp_(-config.norm_constraint, config.norm_constraint)
            if config.decayed_entries == "all" and config.weight_decay:
                shrink += config.lr * config.weight_decay * (1 - shrink)
                change.copy_(torch.where(mask, change, shrunk(weight, shrink, config.norm_constraint)))
        steps += 1
    if late is not None:
        history.append(late.read())
    distance_R = losses.distance_R.detach()
    distance_in, distance_out = float(distance_R[:-1].mean()), float(distance_R[-1:].mean())
    return TrainingResult(change.detach(), shrink, history, steps, stopped, distance_in, distance_out)


def _evaluate(
    model: nn.Module, name: str, rows: LabeledRows, forward: MapForward, change: torch.Tensor, config: WISEConfig
) -> _Losses:
    """Losses of the model with the copy in place of the weight."""
    transposed, activation = is_transposed(model.get_submodule(name)), activation_of(model, config)
    shifts: list[torch.Tensor] = []

    def copy_output(x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        copy_RTD = output_with_delta(x_RTF, output_RTD, change, transposed)
        shifts.append(activation_shift(output_RTD, copy_RTD, activation))
        return copy_RTD.to(output_RTD.dtype)

    nll_L = forward.nll(copy_output)
    (shift_RT,) = shifts
    extra = 1 if config.target_mean == "released" else 0
    nll = (nll_L / (rows.counts_L().to(nll_L.device) + extra)).sum() / (len(rows.ids_RT) - 1)
    distance_R = row_distance(shift_RT, rows.mask_RT.bool().to(shift_RT.device))
    inside_R, outside_R = distance_R[:-1], distance_R[-1:]
    margin = (
        mean_positive(outside_R - inside_R + config.gamma)
        + mean_positive(outside_R - config.alpha)
        + mean_positive(config.beta - inside_R)
    )
    return _Losses(nll, margin, distance_R)


def has_converged(losses: list[float]) -> bool:
    """Whether the loss is small and hardly changes."""
    return len(losses) > 1 and abs(losses[-1] - losses[-2]) <= STOP_CHANGE and losses[-1] <= STOP_LOSS


# -- memories ----------------------------------------------------------------------------------------------------------


def _new_memory(weight: torch.Tensor, bank: MemoryBank, config: WISEConfig) -> Memory:
    """A memory equal to the original, with the mask of its shard of edits."""
    if config.mask is not None:
        mask = torch.as_tensor(config.mask).bool().view(weight.shape)
    else:
        shard = bank.num_edits // config.save_every
        mask = _drawn_mask(config.seed * 1_000_003 + shard, tuple(weight.shape), config.mask_ratio)
    zero = torch.zeros(weight.shape, dtype=at_least_float32(weight[:0]).dtype, device=weight.device)
    return Memory(bank.next_number, zero, mask.to(weight.device, copy=True), 0.0)


@functools.lru_cache(maxsize=1)
def _drawn_mask(seed: int, shape: tuple[int, ...], share: float) -> torch.Tensor:
    """A random mask, on the CPU, where its numbers are the same everywhere.

    Independent edits have the same one, which takes as long to draw as a few steps (0.5 s for 58 million entries).
    """
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) < share
