"""LoRA: a low-rank adapter trained on the edited texts.

``kind: lora`` (Hu et al.): W x + (alpha / r) B A dropout(x), A [r, f] Kaiming, B [d, r] zero. ``kind: adalora`` (Zhang
et al.), EasyEdit's choice for all models but Qwen2.5: W x + alpha / (r + 1e-5) B (E A) dropout(x), A and B normal with
deviation 0.02, E [r, 1] zero, plus half the mean of ||A A^T - I|| and ||B^T B - I|| over all A and B. There r is
``initial_rank``: the release never calls the rank allocator, so its rank stays 12, and the rank in its files is unused.

The loss is the mean over all target tokens of a chunk; Adam; no early stop. All blocks are adapted unless ``layers`` is
set. The adapters are those of peft but act through forward hooks, and each module draws its adapter and its dropout
masks from generators of its own: peft would put layers into the model and draw from the global generator. The result is
B A as low-rank factors: an edit acts per row of a batch, and dropout cannot act when the edited model is used. In a
stream the training of one adapter continues, with a new optimizer per step. A step's delta is the adapter after it
minus the adapter before it; the adapter is stored in ``Delta.stream_state``.

Not copied from EasyEdit: it leaves ``use_cache`` off, gradient checkpointing on and the adapters' dropout in training
mode, so its answers after an edit are random.

Shapes: r rank, f and d input and output width of an adapted map.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from edit_hooks.base.artifacts.given_tensors import Shape, read_shapes
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, StreamGrowth, low_rank_footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.label_forward import ENGINES, CachedLabelForward, shared_nll
from edit_hooks.gradient.labeled_rows import ROW_STEP, LabeledRow, batch_rows, mean_per_row, target_row
from edit_hooks.gradient.side_by_side import make_adam, split_edits
from edit_hooks.gradient.stepping.dropout import Dropout, StepNoise
from edit_hooks.gradient.stepping.fixed_steps import FixedSteps
from edit_hooks.gradient.stepping.kept_training import KeptTraining
from edit_hooks.modeling.architectures import (
    Role,
    architecture_of,
    is_transposed,
    map_shape,
    num_layers,
    require_distinct,
    unwrapped,
    weight_of,
)
from edit_hooks.modeling.device.run_ahead import LateValues, runs_ahead
from edit_hooks.modeling.hooks import Registration, frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.progress import Rounds
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE, SHARE_BELOW_ONE

ADALORA_STD = 0.02  # of A and B of AdaLoRA at the start
STATE_PREFIX = "adapter"  # of the adapter in saved edits


@dataclass(kw_only=True)
class LoRAConfig(EditorConfig):
    """Settings of the adapter; ``layers`` are by default all blocks."""

    kind: Literal["lora", "adalora"] = config_field("the adapter: LoRA, or AdaLoRA at a fixed rank", default="lora")
    modules: list[Role] = config_field("the adapted linear maps of a block", default_factory=lambda: ["query_value"])
    rank: int = config_field("rank of kind=lora", within=POSITIVE, default=8)
    initial_rank: int = config_field("rank of kind=adalora, which does not change", within=POSITIVE, default=12)
    alpha: float = config_field("scale of the adapter, divided by its rank", within=POSITIVE, default=32.0)
    dropout: float = config_field("dropout of the adapter's input during training", within=SHARE_BELOW_ONE, default=0.1)
    orthogonality: float = config_field(
        "kind=adalora: factor of the penalty that keeps A and B orthogonal", within=NON_NEGATIVE, default=0.5
    )
    initial_adapters: dict[str, torch.Tensor] | str | None = config_field(
        "adapters at the start, instead of a draw from the seed: by module A.<module> [rank, width in], B.<module> "
        "[width out, rank] and for kind=adalora E.<module> [rank, 1]; a mapping or a safetensors file",
        default=None,
    )
    num_steps: int = config_field("passes over the requests", within=POSITIVE, default=60)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=5e-3)
    weight_decay: float = config_field("Adam's L2 penalty", within=NON_NEGATIVE, default=0.0)
    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=1)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.modules:
            raise EditingError("editor setting 'modules' is empty; name at least one kind of linear map.")
        require_distinct("modules", self.modules)  # fail fast: names of maps are formed with the model


class LoRAFactors(NamedTuple):
    """The trained tensors of one module: A [r, f], B [d, r], AdaLoRA's E [r, 1]; or those of several edits, stacked."""

    A: torch.Tensor
    B: torch.Tensor
    E: torch.Tensor | None = None

    def scale(self, config: LoRAConfig) -> float:
        """Factor of the adapter's output."""
        rank = self.A.shape[-2]
        return config.alpha / (rank if self.E is None else rank + 1e-5)

    @property
    def right(self) -> torch.Tensor:
        """A, its rows scaled by E."""
        return self.A if self.E is None else self.A * self.E

    def output(self, x_RTF: torch.Tensor, config: LoRAConfig) -> torch.Tensor:
        """What the adapter adds to its module's output, [R, T, d]; row r uses the adapter of edit r if stacked."""
        return (x_RTF @ self.right.mT) @ self.B.mT * self.scale(config)

    def factor(self, config: LoRAConfig, transposed: bool) -> Factor:
        """The update of the weight that equals this adapter."""
        return Factor(self.B * self.scale(config), self.right.mT, transposed)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LoRAFactors:
        """Apply a function to every tensor."""
        return LoRAFactors(function(self.A), function(self.B), None if self.E is None else function(self.E))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self if tensor is not None]


class LoRA(Editor[LoRAConfig]):
    """A LoRA or AdaLoRA adapter trained on the requests."""

    name = "lora"
    config_class = LoRAConfig
    config_folders = ("lora",)
    needs_subject = False
    edits_quantized = True
    supports_joint = True
    reads_past_updates = False
    stream_growth = StreamGrowth("the adapters after the last step: r (f + d) numbers per adapted map", "no")
    # Published settings adapt attention projections; the contract compares with editors of the rewrite module.
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "modules": ["rewrite"],
        "num_steps": 8,
        "lr": 2e-2,
        "rank": 2,
    }

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        return list(range(num_layers(model_config)))

    def default_config(self, model: nn.Module) -> LoRAConfig:
        config = super().default_config(model)
        if config.initial_adapters is not None:
            shapes = adapter_shapes(unwrapped(model), self.target_modules(config, unwrapped(model)), config)
            config.initial_adapters = read_shapes(config.initial_adapters, "initial_adapters", shapes)
        return config

    def target_modules(self, config: LoRAConfig, model: nn.Module) -> list[str]:
        return architecture_of(model).all_module_names(config.modules, config.edited_layers)

    def footprint(self, config: LoRAConfig, model: nn.Module) -> Footprint:
        rank = config.rank if config.kind == "lora" else config.initial_rank
        return low_rank_footprint(model, self.target_modules(config, model), config.edited_layers, config, rank)

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        """The adapters after the last step are all that the next one reads."""
        return [Delta(stream_state=history[-1].stream_state)] if history else []

    def compute(self, job: EditJob[LoRAConfig]) -> list[Delta]:
        names = self.target_modules(job.config, job.model)
        for name in names:
            if hasattr(job.model.get_submodule(name), "base_layer"):
                raise EditingError(
                    f"{name} carries an adapter already; merge it into the weights (merge_and_unload) before "
                    "editing with 'lora', or use another editor."
                )
        start = _adapters_after(job.model, job.history, names) if job.history else {}
        training = _Training(job, names, start)
        rows = [
            target_row(job.tokenizer, request.text, request.continuation, append_eos=job.config.append_eos)
            for request in job.requests
        ]
        with frozen(job.model):
            if job.joint:
                return [training.train(rows)]
            if job.config.engine == "reference":
                return [training.train([row]) for row in rows]
            return training.train_side_by_side(rows)


class _Training:
    """Training of adapters for the edits of a job.

    Args:
        names: the adapted modules.
        start: the adapter of the stream's earlier steps by module, which the weights hold already; empty without one.
    """

    def __init__(self, job: EditJob[LoRAConfig], names: Sequence[str], start: dict[str, LoRAFactors]) -> None:
        self.job, self.model, self.config, self.names = job, job.model, job.config, names
        transposed = is_transposed(job.model.get_submodule(names[0]))
        self.written = {name: adapter.factor(job.config, transposed) for name, adapter in start.items()}
        self.start = start or initial_adapters(job.model, names, job.config)

    def train(self, rows: Sequence[LabeledRow]) -> Delta:
        """Train one edit on all rows, in chunks of ``batch_size``."""
        config = self.config
        chunks = [
            ENGINES[config.engine](
                self.model, batch_rows(self.model, rows[start : start + config.batch_size]), self.names
            )
            for start in range(0, len(rows), config.batch_size)
        ]
        adapters = {name: adapter.map(_trainable) for name, adapter in self.start.items()}
        dropouts = self._dropouts([None])
        optimizer = self._adam(adapters.values())
        kept = KeptTraining(self.model, optimizer, rows, [one for dropout in dropouts for one in dropout.generators])
        sums = LateValues(kept.resume().get("sums", ()))  # of all chunks, one pass after another
        rounds = Rounds(len(rows), config.num_steps + 1, self.job.progress)
        rounds.next(len(sums) // len(chunks))
        with hooks(*self._registrations(adapters, dropouts)):
            while len(sums) < (config.num_steps + 1) * len(chunks):
                is_training = len(sums) < config.num_steps * len(chunks)
                for dropout in dropouts:
                    dropout.is_active = is_training
                with torch.set_grad_enabled(is_training):
                    nll_L = chunks[len(sums) % len(chunks)].nll()
                sums.append(nll_L.detach().sum())
                if is_training:
                    optimizer.zero_grad()
                    (nll_L.mean() + orthogonality(adapters.values(), config, nll_L.device)).backward()
                    optimizer.step()
                    kept.after_step(lambda: {"sums": sums.read()})
                if len(sums) % len(chunks) == 0:
                    rounds.next()
        values = sums.read()
        count = sum(len(chunk.rows.token_L) for chunk in chunks)
        losses = [sum(values[start : start + len(chunks)]) / count for start in range(0, len(values), len(chunks))]
        return self._delta(adapters, losses)

    def train_side_by_side(self, rows: Sequence[LabeledRow]) -> list[Delta]:
        """Train one edit per row; the edits of a batch share forward passes."""
        trained_bytes = sum(t.numel() * t.element_size() for adapter in self.start.values() for t in adapter.tensors)
        deltas: dict[int, Delta] = {}
        for batch in split_edits(self.model, [len(row.ids) for row in rows], trained_bytes):
            groups = [self._group(edits, rows) for edits in batch]
            for group, losses in zip(groups, self._fit(groups), strict=True):
                for index, edit in enumerate(group.edits):
                    own = {name: adapter.map(operator.itemgetter(index)) for name, adapter in group.adapters.items()}
                    deltas[edit] = self._delta(own, [loss_E[index] for loss_E in losses])
            self.job.progress(sum(map(len, batch)))
        return [deltas[index] for index in range(len(rows))]

    def _group(self, edits: list[int], rows: Sequence[LabeledRow]) -> _Group:
        batch = batch_rows(self.model, [rows[edit] for edit in edits], in_buckets=True)
        adapters = {
            name: adapter.map(lambda tensor: _trainable(tensor.repeat(len(edits), 1, 1)))
            for name, adapter in self.start.items()
        }
        lengths = [len(rows[edit].ids) for edit in edits]
        draws_ahead = self.config.dropout and runs_ahead(batch.ids_RT.device)
        if draws_ahead:  # for as many columns as a row alone is padded to, so that recorded steps of other rows fit
            lengths = [length + -length % ROW_STEP for length in lengths]
        dropouts, noise = self._dropouts(lengths), None
        if draws_ahead:
            widths = [map_shape(self.model.get_submodule(name))[1] for name in self.names]
            noise = StepNoise(lengths, widths, batch.ids_RT.device, self.config.seed)
            for number, dropout in enumerate(dropouts):
                dropout.drawn = noise.of_module(number)
        return _Group(edits, CachedLabelForward(self.model, batch, self.names), adapters, dropouts, noise)

    def _fit(self, groups: Sequence[_Group]) -> list[list[list[float]]]:
        """Train all groups in place; the losses of every group, pass and edit."""
        config = self.config
        optimizer = self._adam([adapter for group in groups for adapter in group.adapters.values()])

        def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
            losses = self._losses(groups, is_training=True)
            totals = []
            for loss_E, group in zip(losses, groups, strict=True):
                totals.append((loss_E + orthogonality(group.adapters.values(), config, loss_E.device)).sum())
            return torch.stack(totals).sum(), torch.cat(losses)

        sources = [group.noise for group in groups if group.noise is not None]

        def draw(noise: Sequence[torch.Tensor]) -> None:
            for number, generator in enumerate(generator for source in sources for generator in source.generators):
                noise[number].uniform_(generator=generator)

        names = ("num_steps", "lr", "weight_decay", "alpha", "dropout", "orthogonality")
        key = (*self.names, *(getattr(config, name) for name in names))
        reads = [self.written and list(self.written.values()), [group.reads for group in groups]]
        noise = [buffer for source in sources for buffer in source.buffers]
        steps = FixedSteps(self.model, optimizer, evaluate, "lora", key, reads, noise)
        history = steps.run(config.num_steps, draw if sources else None)
        with torch.no_grad():
            history.append(torch.cat(self._losses(groups, is_training=False)))
        sizes = [len(group.edits) for group in groups]
        return [losses_SE.tolist() for losses_SE in torch.stack(history).cpu().split(sizes, 1)]

    def _losses(self, groups: Sequence[_Group], is_training: bool) -> list[torch.Tensor]:
        """Losses [E] of every group."""
        states = [self._label_states(group, is_training) for group in groups]
        nlls = shared_nll(states, [group.forward for group in groups])
        return [mean_per_row(nll_L, group.forward.rows) for nll_L, group in zip(nlls, groups, strict=True)]

    def _label_states(self, group: _Group, is_training: bool) -> torch.Tensor:
        for dropout in group.dropouts:
            dropout.is_active = is_training
        with hooks(*self._registrations(group.adapters, group.dropouts)):
            return group.forward.label_states()

    def _adam(self, adapters: Iterable[LoRAFactors]) -> torch.optim.Adam:
        leaves = [tensor for adapter in adapters for tensor in adapter.tensors]
        return make_adam(leaves, self.config.lr, self.config.weight_decay, self.config.engine)

    def _dropouts(self, lengths: Sequence[int | None]) -> list[Dropout]:
        """Dropout of every module, for edits with rows of these lengths (``None``: as wide as the batch)."""
        config = self.config
        return [
            Dropout(config.dropout, weight_of(self.model.get_submodule(name)).device, config.seed, number, lengths)
            for number, name in enumerate(self.names)
        ]

    def _registrations(self, adapters: dict[str, LoRAFactors], dropouts: Sequence[Dropout]) -> list[Registration]:
        """Hooks by which the modules compute with the adapters instead of those that the weights hold."""
        # Training continues the adapter that the weights hold, so its share must not act twice.
        submodule = self.model.get_submodule
        standing = [_subtract_output(submodule(name), factor) for name, factor in self.written.items()]
        trained = [
            _add_output(submodule(name), adapters[name], dropout, self.config)
            for name, dropout in zip(self.names, dropouts, strict=True)
        ]
        return [*standing, *trained]

    def _delta(self, adapters: dict[str, LoRAFactors], losses: list[float]) -> Delta:
        """The trained adapter minus the one that the weights hold already."""
        delta = Delta(diagnostics=loss_diagnostics(losses, num_steps=len(losses) - 1))
        for name, adapter in adapters.items():
            trained = adapter.map(lambda tensor: tensor.detach().clone())
            factor = trained.factor(self.config, is_transposed(self.model.get_submodule(name)))
            delta.stream_state |= {
                f"{STATE_PREFIX}/{part}/{name}": tensor
                for part, tensor in trained._asdict().items()
                if tensor is not None
            }
            if name in self.written:
                written = self.written[name]
                left = torch.cat([factor.left, -written.left.to(factor.left)], 1)
                right = torch.cat([factor.right, written.right.to(factor.right)], 1)
                factor = Factor(left, right, factor.transposed)
            delta.factors[name] = factor
        delta.diagnostics["update_norm_ratio"] = update_norm_ratio(self.model, delta)
        return delta


@dataclass
class _Group:
    """Independent edits whose rows run together, one row each; ``edits`` are the indices of their rows."""

    edits: list[int]
    forward: CachedLabelForward
    adapters: dict[str, LoRAFactors]
    dropouts: list[Dropout]
    noise: StepNoise | None

    @property
    def reads(self) -> list[Any]:
        """The tensors that its losses depend on, besides model, adapters and noise."""
        forward = self.forward
        return [forward.rows, forward.rows.counts_L(), forward.outputs, forward.positions]


def _trainable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is trained."""
    return tensor.detach().clone().requires_grad_()


def orthogonality(adapters: Iterable[LoRAFactors], config: LoRAConfig, device: torch.device) -> torch.Tensor | float:
    """AdaLoRA's orthogonality penalty, factor included; one per edit for stacked adapters.

    The mean over all A and B of the Frobenius norm of the Gram matrix minus I.

    Args:
        device: of the result: adapters may be on several, and the loss on yet another.
    """
    sides = [side for adapter in adapters if adapter.E is not None for side in (adapter.A, adapter.B.mT)]
    if sides and runs_ahead(device):
        sides = _stacked(sides)  # few products instead of two for every module
    grams = [side @ side.mT for side in sides]
    norms = [
        torch.linalg.matrix_norm(gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))
        for gram in grams
    ]
    if sides and runs_ahead(device):
        norms = [norm for of_stack in norms for norm in of_stack]
    return config.orthogonality * torch.stack([norm.to(device) for norm in norms]).mean(0) if norms else 0.0


def _stacked(sides: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one shape and device together, along a new first axis."""
    alike: dict[Hashable, list[torch.Tensor]] = {}
    for side in sides:
        alike.setdefault((side.shape, side.device), []).append(side)
    return [torch.stack(group) for group in alike.values()]


def _adapters_after(model: nn.Module, history: Sequence[Delta], names: Sequence[str]) -> dict[str, LoRAFactors]:
    """The adapter after the last step of a stream, by module."""
    state = history[-1].stream_state
    if any(f"{STATE_PREFIX}/A/{name}" not in state for name in names):
        raise EditingError(
            "the last delta of the history holds no adapter for these modules; a stream has one editor and one "
            "configuration throughout."
        )
    adapters = {}
    for name in names:
        device = weight_of(model.get_submodule(name)).device
        a, b, e = (state.get(f"{STATE_PREFIX}/{part}/{name}") for part in LoRAFactors._fields)
        assert a is not None and b is not None, "written together"
        adapters[name] = LoRAFactors(a.to(device), b.to(device), None if e is None else e.to(device))
    return adapters


def _subtract_output(module: nn.Module, factor: Factor) -> Registration:
    """Register a hook that subtracts a factor's share from a map's output."""

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        share = (args[0].to(factor.right) @ factor.right) @ factor.left.T
        return (at_least_float32(output) - share.to(output.device)).to(output.dtype)

    return Registration(module, hook)


def adapter_shapes(model: nn.Module, names: Sequence[str], config: LoRAConfig) -> dict[str, Shape]:
    """Shapes of the adapters' tensors by their names in ``initial_adapters``."""
    shapes: dict[str, Shape] = {}
    for name in names:
        width_out, width_in = map_shape(model.get_submodule(name))
        rank = config.initial_rank if config.kind == "adalora" else config.rank
        shapes |= {f"A.{name}": (rank, width_in), f"B.{name}": (width_out, rank)}
        if config.kind == "adalora":
            shapes[f"E.{name}"] = (rank, 1)
    return shapes


def initial_adapters(model: nn.Module, names: Sequence[str], config: LoRAConfig) -> dict[str, LoRAFactors]:
    """The given adapters by module, or such that change nothing yet, with peft's distributions; float32 or wider.

    Every module's adapter is drawn from a generator of its own.
    """
    adapters = {}
    for number, name in enumerate(names):
        module = model.get_submodule(name)
        weight = weight_of(module)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + 2 * number)
        width_out, width_in = map_shape(module)
        given = config.initial_adapters
        if isinstance(given, dict):
            adapter = LoRAFactors(given[f"A.{name}"], given[f"B.{name}"], given.get(f"E.{name}"))
        elif config.kind == "adalora":
            a = torch.empty(config.initial_rank, width_in, dtype=torch.float32).normal_(
                0, ADALORA_STD, generator=generator
            )
            b = torch.empty(width_out, config.initial_rank, dtype=torch.float32).normal_(
                0, ADALORA_STD, generator=generator
            )
            adapter = LoRAFactors(a, b, torch.zeros(config.initial_rank, 1))
        else:
            bound = 1 / math.sqrt(width_in)  # Kaiming with a = sqrt(5)
            a = torch.empty(config.rank, width_in, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            adapter = LoRAFactors(a, torch.zeros(width_out, config.rank))
        adapters[name] = adapter.map(functools.partial(torch.Tensor.to, device=weight.device, dtype=dtype))
    return adapters


def _add_output(module: nn.Module, adapter: LoRAFactors, dropout: Dropout, config: LoRAConfig) -> Registration:
    """Register a hook that adds the adapter's output to that of its module."""

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        added = adapter.output(dropout(args[0].to(adapter.A.dtype)), config)
        return (at_least_float32(output) + added).to(output.dtype)

    return Registration(module, hook)
