"""FT-M: fine-tune one MLP projection on the target tokens.

The text is the prompt with ``target_new``; the loss is the mean over requests of the mean over a request's target
tokens (``objective: last_token`` is FT-L, see ``ft_l.py``). Adam; a chunk whose loss is below ``early_stop_loss`` is
not stepped, and the run stops when the mean loss of a pass is. With ``norm_constraint`` the weights stay in an
l-infinity ball around their initial values. This is the FT of the editing frameworks with the objective on the target
tokens, as used in "The Mirage of Model Editing". Target positions come from the encoding, so the padding side does not
matter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import (
    NOTHING_CARRIED,
    ROW_TOKENS,
    TARGET_TOKENS,
    Footprint,
    copies_bytes,
    dense_bytes,
    kept_activations,
    training_work,
)
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.label_forward import ENGINES, CachedLabelForward, LabelForward, shared_nll
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    LabeledRows,
    Objective,
    batch_rows,
    mean_over_rows,
    mean_per_row,
    target_row,
)
from edit_hooks.gradient.side_by_side import EditBatch, make_adam, split_edits
from edit_hooks.gradient.stepping.fixed_steps import FixedSteps
from edit_hooks.gradient.stepping.kept_training import KeptTraining
from edit_hooks.gradient.weight_copies import BlockCopies, WeightCopies
from edit_hooks.modeling.architectures import architecture_of, input_device
from edit_hooks.modeling.device.run_ahead import LateRead, launch_early, runs_ahead
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.linear_maps import is_linear_map
from edit_hooks.modeling.memory import bytes_per_token, free_bytes
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.progress import Rounds
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

MOST_KEPT_TOKENS = 2**16  # of one forward pass


@dataclass(kw_only=True)
class FTConfig(EditorConfig):
    """Settings of fine-tuning MLP output projections."""

    objective: Objective = config_field(
        "labels of the loss; target_tokens: each target token, predicted from those before it; last_token: all target "
        "tokens, predicted at the prompt's last token",
        default="target_tokens",
    )
    num_steps: int = config_field("passes over the requests", within=POSITIVE, default=25)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=5e-4)
    weight_decay: float = config_field("Adam's L2 penalty", within=NON_NEGATIVE, default=0.0)
    norm_constraint: float | None = config_field(
        "radius of the l-infinity ball around the initial weights; null: none", within=POSITIVE, default=None
    )
    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=1)
    early_stop_loss: float = config_field("stop when the mean loss of a pass falls below this", default=1e-2)
    train_bias: bool = config_field("also train the bias where the module has one", default=True)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)
    shuffle: bool = config_field(
        "shuffle the requests of a joint edit with the seed before every pass, each order from the one before",
        default=False,
    )
    trained: Literal["rewrite", "block"] = config_field(
        "what is trained in each layer; rewrite: the MLP output projection; block: every parameter, norms included",
        default="rewrite",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.append_eos and self.objective == "last_token":
            raise EditingError(
                "append_eos=true with objective=last_token would train the end of the text right after the prompt; use "
                "it with objective=target_tokens."
            )


FTConfigT = TypeVar("FTConfigT", bound=FTConfig)


class TrainingRule(Generic[FTConfigT]):
    """What a variant of fine-tuning changes: the loss of a chunk, the optimizer and its steps.

    Attributes:
        has_plain_steps: whether a step is the optimizer's and nothing else.
    """

    has_plain_steps = True

    def __init__(self, config: FTConfigT) -> None:
        self.config = config

    def loss(self, nll_L: torch.Tensor, rows: LabeledRows) -> torch.Tensor:
        """The loss of a chunk of a joint edit; independent edits have a row each, and the mean over it."""
        return mean_over_rows(nll_L, rows)

    def optimizer(self, copies: Sequence[WeightCopies | BlockCopies]) -> torch.optim.Optimizer:
        """The optimizer of the leaves of all copies."""
        leaves = [leaf for group in copies for leaf in group.leaves.values()]
        return make_adam(leaves, self.config.lr, self.config.weight_decay, self.config.engine)

    def step(self, optimizer: torch.optim.Optimizer, copies: Sequence[WeightCopies | BlockCopies]) -> None:
        """One step with the gradients of the leaves."""
        optimizer.step()

    def describe(self, delta: Delta) -> None:
        """Complete the diagnostics of a finished edit."""

    def carry(self, delta: Delta, copies: WeightCopies | BlockCopies, optimizer: torch.optim.Optimizer) -> None:
        """Add to a joint edit what later steps of a stream need."""


class FineTuningEditor(Editor[FTConfigT]):
    """Fine-tuning of rewrite modules; base of FT-M and FT-L."""

    needs_subject = False
    supports_joint = True
    reads_past_updates = False
    default_depth = 0.68
    stream_growth = NOTHING_CARRIED

    def target_modules(self, config: FTConfigT, model: nn.Module) -> list[str]:
        if config.trained == "rewrite":
            return super().target_modules(config, model)
        return maps_of_blocks(model, config.edited_layers)

    def footprint(self, config: FTConfigT, model: nn.Module) -> Footprint:
        names, first = self.target_modules(config, model), min(config.edited_layers)
        trained = dense_bytes(model, names)
        kind = {"rows": 1, "tokens": ROW_TOKENS, "labels": TARGET_TOKENS}
        return Footprint(
            copies=copies_bytes(model, names),
            activations=kept_activations(model, first=first, **kind),
            update=trained,
            work=training_work(model, first=first, steps=config.num_steps, trained=trained),
        )

    def compute(self, job: EditJob[FTConfigT]) -> list[Delta]:
        rows = [self.row(job.tokenizer, request, job.config) for request in job.requests]
        rule = self.rule(job)
        with frozen(job.model), torch.enable_grad():
            if job.joint:
                return [train_rows(job, rows, rule)]
            if job.config.engine == "reference" or job.config.trained == "block":
                return [train_rows(job, [row], rule) for row in rows]
            return _train_side_by_side(job, rows, rule)

    def rule(self, job: EditJob[FTConfigT]) -> TrainingRule[FTConfigT]:
        """Hook: loss, optimizer and steps of a job."""
        return TrainingRule(job.config)

    def row(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTConfigT) -> LabeledRow:
        """Hook: the row a request is trained on."""
        return target_row(tokenizer, request.text, request.continuation, config.objective, config.append_eos)


class FTM(FineTuningEditor[FTConfig]):
    """Fine-tuning of MLP output projections on the target tokens."""

    name = "ft_m"
    config_class = FTConfig
    config_folders = ("ft_m",)
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 5e-3}


def maps_of_blocks(model: nn.Module, layers: Sequence[int]) -> list[str]:
    """Names of all linear maps of some blocks."""
    arch = architecture_of(model)
    blocks = [arch.block_name(layer) for layer in layers]
    return [
        name
        for block in blocks
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if is_linear_map(module)
    ]


def train_rows(job: EditJob[FTConfigT], rows: Sequence[LabeledRow], rule: TrainingRule[FTConfigT]) -> Delta:
    """Train one edit on all rows, in chunks of ``batch_size``: that of all requests if it is joint."""
    config = job.config
    if config.trained == "block":
        arch = architecture_of(job.model)
        copies: WeightCopies | BlockCopies = BlockCopies(
            job.model, [arch.block_name(layer) for layer in config.edited_layers]
        )
    else:
        copies = WeightCopies(job.model, _trained_modules(job), config.train_bias)
    chunks = _Chunks(job, rows, list(copies.modules))
    optimizer = rule.optimizer([copies])
    kept = KeptTraining(job.model, optimizer, rows)
    state = _TrainingState(**kept.resume())
    chunks.skip_passes(len(state.losses))
    num_edits = len(job.requests) if job.joint else 1
    rounds = Rounds(num_edits, config.num_steps * chunks.per_pass, job.progress)
    rounds.next(len(state.losses) * chunks.per_pass + state.chunk)
    while len(state.losses) < config.num_steps:
        for chunk in chunks.of_pass(state.chunk):
            with copies.used_by_model():
                loss = rule.loss(chunk.nll(), chunk.rows)
            read = LateRead(loss)
            optimizer.zero_grad()
            set_gradients = launch_early(loss.device, loss.backward)
            value = float(read.wait())
            state.total += value * len(chunk.rows.ids_RT)
            if value >= config.early_stop_loss:
                set_gradients()
                rule.step(optimizer, [copies])
                state.num_steps += 1
            copies.project(config.norm_constraint)
            state.chunk += 1
            rounds.next()
            kept.after_step(lambda: vars(state))
        state.losses.append(state.total / len(rows))
        state.total, state.chunk = 0.0, 0
        if state.losses[-1] < config.early_stop_loss:
            break
    rounds.end()
    stopped_early = state.losses[-1] < config.early_stop_loss
    diagnostics = loss_diagnostics(state.losses, state.num_steps, stopped_early=stopped_early)
    delta = copies.delta(diagnostics) if isinstance(copies, BlockCopies) else copies.delta(0, diagnostics)
    rule.describe(delta)
    if job.joint:
        rule.carry(delta, copies, optimizer)
    return delta


@dataclass
class _TrainingState:
    """How far the training of a joint edit is, besides its tensors.

    Attributes:
        losses: of the finished passes.
        num_steps: chunks that were stepped.
        total: the sum of the losses of this pass. chunk: the next one in it.
    """

    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    total: float = 0.0
    chunk: int = 0


class _Chunks(Generic[FTConfigT]):
    """The chunks of a joint edit, pass by pass.

    Shuffled ones are taken from one forward pass of all rows up to the trained maps, if its states fit into memory;
    else that part runs again for every chunk.
    """

    def __init__(self, job: EditJob[FTConfigT], rows: Sequence[LabeledRow], names: Sequence[str]) -> None:
        self.job, self.rows, self.names = job, rows, names
        self.order = list(range(len(rows)))
        self.draws = random.Random(job.config.seed)
        self.whole: CachedLabelForward | None = None
        self.fixed: list[LabelForward] = []
        if not self._is_shuffled:
            self.fixed = [self._forward(group) for group in self._groups()]
        elif job.config.engine == "fast" and self._states_fit():
            self.whole = CachedLabelForward(job.model, batch_rows(job.model, rows), names)

    def skip_passes(self, count: int) -> None:
        """Draw the orders of passes that an earlier run has finished."""
        for _ in range(count if self._is_shuffled else 0):
            self.draws.shuffle(self.order)

    def of_pass(self, start: int) -> Iterator[LabelForward]:
        """The chunks of the next pass, from one of them on."""
        if not self._is_shuffled:
            yield from self.fixed[start:]
            return
        self.draws.shuffle(self.order)
        for group in self._groups()[start:]:
            yield self._forward(group) if self.whole is None else self._part_of(self.whole, group)

    @property
    def per_pass(self) -> int:
        """Number of chunks of a pass."""
        return len(self._groups())

    @property
    def _is_shuffled(self) -> bool:
        return self.job.config.shuffle and len(self.rows) > 1

    def _groups(self) -> list[list[int]]:
        size = self.job.config.batch_size
        return [self.order[start : start + size] for start in range(0, len(self.order), size)]

    def _forward(self, group: Sequence[int]) -> LabelForward:
        batch = batch_rows(self.job.model, [self.rows[index] for index in group])
        return ENGINES[self.job.config.engine](self.job.model, batch, self.names)

    def _part_of(self, whole: CachedLabelForward, group: Sequence[int]) -> LabelForward:
        part = copy.copy(whole)
        keep_R = torch.zeros(len(self.rows), dtype=torch.bool)
        keep_R[list(group)] = True
        part.select(keep_R)
        return part

    def _states_fit(self) -> bool:
        """Whether the states of all rows take at most a quarter of the free memory."""
        model = self.job.model
        num_tokens = len(self.rows) * max(len(row.ids) for row in self.rows)
        free = free_bytes(input_device(model))
        return num_tokens <= MOST_KEPT_TOKENS and (free is None or num_tokens * bytes_per_token(model) <= free // 4)


def _train_side_by_side(
    job: EditJob[FTConfigT], rows: Sequence[LabeledRow], rule: TrainingRule[FTConfigT]
) -> list[Delta]:
    """Train one edit per row; the edits of a batch share forward passes."""
    trained_bytes = WeightCopies(job.model, _trained_modules(job), job.config.train_bias).edit_bytes
    deltas: dict[int, Delta] = {}
    for batch in split_edits(job.model, [len(row.ids) for row in rows], trained_bytes):
        deltas |= _SideBySide(job, rows, batch, rule).train()
    return [deltas[index] for index in range(len(rows))]


class _SideBySide(Generic[FTConfigT]):
    """Independent edits of one batch; a finished edit leaves it."""

    def __init__(
        self, job: EditJob[FTConfigT], rows: Sequence[LabeledRow], batch: EditBatch, rule: TrainingRule[FTConfigT]
    ) -> None:
        self.job, self.rule = job, rule
        names = _trained_modules(job)
        self.groups = [
            _Group(
                group,
                CachedLabelForward(
                    job.model, batch_rows(job.model, [rows[edit] for edit in group], in_buckets=True), names
                ),
                WeightCopies(job.model, names, job.config.train_bias, len(group)),
            )
            for group in batch
        ]
        self.optimizer = rule.optimizer([group.copies for group in self.groups])
        self.losses: dict[int, list[float]] = {edit: [] for group in batch for edit in group}
        self.deltas: dict[int, Delta] = {}

    def train(self) -> dict[int, Delta]:
        """Train all edits; index of the row -> delta."""
        config = self.job.config
        if self._is_alone_on_a_gpu():
            self._train_alone(config)
            return self.deltas
        for _ in range(config.num_steps):
            self._step(config)
            if not self.groups:
                break
        for group in self.groups:
            self._finish(group, torch.ones(len(group.edits), dtype=torch.bool), stopped_early=False)
        return self.deltas

    def _is_alone_on_a_gpu(self) -> bool:
        """Whether one edit trains, whose steps wait for their launches."""
        is_fused = bool(self.optimizer.defaults.get("fused"))
        device = self.groups[0].forward.rows.ids_RT.device
        return len(self.losses) == 1 and runs_ahead(device) and is_fused and self.rule.has_plain_steps

    def _train_alone(self, config: FTConfigT) -> None:
        """Train the only edit in steps that can be recorded."""
        (group,) = self.groups
        (edit,) = group.edits
        forward, copies = group.forward, group.copies

        def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
            (nll_L,) = shared_nll([group.label_states()], [forward])
            loss_E = mean_per_row(nll_L, forward.rows)
            return loss_E.sum(), loss_E

        names = ("lr", "weight_decay", "norm_constraint", "early_stop_loss")
        key = (*copies.leaves, *(getattr(config, name) for name in names))
        reads = [forward.rows, forward.rows.counts_L(), forward.outputs, forward.positions, copies.own_start]
        steps = FixedSteps(
            self.job.model,
            self.optimizer,
            evaluate,
            "fine-tuning",
            key,
            reads,
            after_step=lambda: copies.project(config.norm_constraint),
            stop_below=config.early_stop_loss,
        )
        losses = torch.cat(steps.run(config.num_steps)).cpu()
        self.losses[edit] = losses.tolist()
        is_below = not bool(losses[-1] >= config.early_stop_loss)
        self._finish(group, torch.ones(1, dtype=torch.bool), stopped_early=is_below)

    def _step(self, config: FTConfigT) -> None:
        """One pass of all edits: edits with a loss below the bound finish, the others are stepped."""
        states = [group.label_states() for group in self.groups]
        nlls = shared_nll(states, [group.forward for group in self.groups])
        losses = [mean_per_row(nll_L, group.forward.rows) for nll_L, group in zip(nlls, self.groups, strict=True)]
        read = LateRead(torch.cat(losses))
        self.optimizer.zero_grad()
        set_gradients = launch_early(losses[0].device, torch.cat(losses).sum().backward)
        values = read.wait().split([len(loss_E) for loss_E in losses])
        for group, loss_E in zip(self.groups, values, strict=True):
            for edit, loss in zip(group.edits, loss_E.tolist(), strict=True):
                self.losses[edit].append(loss)
        running = [loss_E >= config.early_stop_loss for loss_E in values]
        if any(keep_E.any() for keep_E in running):
            set_gradients()
        for group, keep_E in zip(self.groups, running, strict=True):
            if not keep_E.all():
                self._finish(group, ~keep_E, stopped_early=True)
                group.select(keep_E, self.optimizer)
        self.groups = [group for group in self.groups if group.edits]
        self.rule.step(self.optimizer, [group.copies for group in self.groups])
        for group in self.groups:
            group.copies.project(config.norm_constraint)

    def _finish(self, group: _Group, done_E: torch.Tensor, *, stopped_early: bool) -> None:
        """Store the deltas of finished edits."""
        for index in done_E.nonzero()[:, 0].tolist():
            losses = self.losses[group.edits[index]]
            num_steps = len(losses) - stopped_early
            diagnostics = loss_diagnostics(losses, num_steps, stopped_early=stopped_early)
            delta = self.deltas[group.edits[index]] = group.copies.delta(index, diagnostics)
            self.rule.describe(delta)
            self.job.progress(1)


@dataclass
class _Group:
    """Edits whose rows run together; ``edits`` are the indices of their rows."""

    edits: list[int]
    forward: CachedLabelForward
    copies: WeightCopies

    def label_states(self) -> torch.Tensor:
        with self.copies.used_by_model():
            return self.forward.label_states()

    def select(self, keep_E: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.edits = [edit for edit, keep in zip(self.edits, keep_E.tolist(), strict=True) if keep]
        self.forward.select(keep_E)
        self.copies.select(keep_E, optimizer)


def _trained_modules(job: EditJob[FTConfigT]) -> list[str]:
    arch = architecture_of(job.model)
    return [arch.rewrite_name(layer) for layer in job.config.edited_layers]
