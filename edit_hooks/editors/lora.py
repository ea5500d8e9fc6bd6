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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.modeling.architectures import Role, architecture_of, is_transposed, map_shape, num_layers, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE, SHARE_BELOW_ONE

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
    num_steps: int = config_field("passes over the requests", within=POSITIVE, default=60)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=5e-3)
    weight_decay: float = config_field("Adam's L2 penalty", within=NON_NEGATIVE, default=0.0)
    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=8)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.modules:
            raise EditingError("editor setting 'modules' is empty; name at least one kind of linear map.")


class Adapter(NamedTuple):
    """The trained tensors of one module: A [r, f], B [d, r], AdaLoRA's E [r, 1]."""

    A: torch.Tensor
    B: torch.Tensor
    E: torch.Tensor | None = None

    def scale(self, config: LoRAConfig) -> float:
        """Factor of the adapter's output."""
        return config.alpha / (len(self.A) if self.E is None else len(self.A) + 1e-5)

    def output(self, x_RTF: torch.Tensor, config: LoRAConfig) -> torch.Tensor:
        """What the adapter adds to its module's output, [R, T, d]."""
        right = self.A if self.E is None else self.A * self.E
        return (x_RTF @ right.T) @ self.B.T * self.scale(config)

    def factor(self, config: LoRAConfig, transposed: bool) -> Factor:
        """The update of the weight that equals this adapter."""
        right = self.A if self.E is None else self.A * self.E
        return Factor(self.B * self.scale(config), right.T, transposed)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Adapter:
        """Apply a function to every tensor."""
        return Adapter(function(self.A), function(self.B), None if self.E is None else function(self.E))

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

    def compute(self, job: EditJob[LoRAConfig]) -> list[Delta]:
        names = architecture_of(job.model).all_module_names(job.config.modules, job.config.edited_layers)
        for name in names:
            if hasattr(job.model.get_submodule(name), "base_layer"):
                raise EditingError(
                    f"{name} carries an adapter already; merge it into the weights (merge_and_unload) before "
                    "editing with 'lora', or use another editor."
                )
        start = _adapters_after(job.model, job.history, names) if job.history else {}
        deltas = []
        with frozen(job.model):
            for group in job.groups:
                deltas.append(_train(job, group, names, start))
                job.progress(len(group))
        return deltas


def _train(
    job: EditJob[LoRAConfig], requests: Sequence[EditRequest], names: list[str], start: dict[str, Adapter]
) -> Delta:
    """Train an adapter on the requests.

    Args:
        start: the adapter of the stream's earlier steps by module, which the weights hold already; empty without one.
    """
    model, config = job.model, job.config
    chunks = _chunks(job, requests)
    transposed = is_transposed(model.get_submodule(names[0]))
    written = {name: adapter.factor(config, transposed) for name, adapter in start.items()}
    adapters = start or initial_adapters(model, names, config)
    adapters = {name: adapter.map(lambda tensor: tensor.clone().requires_grad_()) for name, adapter in adapters.items()}
    dropouts = [
        _Dropout(config.dropout, weight_of(model.get_submodule(name)).device, config.seed, number)
        for number, name in enumerate(names)
    ]
    # Training continues the adapter that the weights hold, so its share must not act twice.
    standing = [_subtract_output(model.get_submodule(name), factor) for name, factor in written.items()]
    trained = [
        _add_output(model.get_submodule(name), adapters[name], dropout, config)
        for name, dropout in zip(names, dropouts, strict=True)
    ]
    with hooks(*standing, *trained):
        losses = _fit(model, chunks, adapters, dropouts, config)
    return _delta(model, adapters, written, losses, config)


def _chunks(job: EditJob[LoRAConfig], requests: Sequence[EditRequest]) -> list[LabeledRows]:
    """The requests in batches of ``batch_size``."""
    config = job.config
    rows = [target_row(job.tokenizer, r.text, r.continuation, append_eos=config.append_eos) for r in requests]
    chunks = [
        batch_rows(job.model, rows[start : start + config.batch_size])
        for start in range(0, len(rows), config.batch_size)
    ]
    if config.engine == "fast":
        for chunk in chunks:
            cache_lower_blocks(job.model, chunk, min(config.edited_layers))
    return chunks


def _fit(
    model: nn.Module,
    chunks: list[LabeledRows],
    adapters: dict[str, Adapter],
    dropouts: Sequence[_Dropout],
    config: LoRAConfig,
) -> list[float]:
    """Train in place.

    Returns:
        The mean loss per target token of every pass, and finally that of the trained adapter without dropout.
    """
    parameters = [tensor for adapter in adapters.values() for tensor in adapter.tensors]
    optimizer = torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    losses = []
    for step in range(config.num_steps + 1):
        is_training = step < config.num_steps
        for dropout in dropouts:
            dropout.is_active = is_training
        total = count = 0.0
        for chunk in chunks:
            with torch.set_grad_enabled(is_training):
                nll_L = label_nll(model, chunk)
            total, count = total + float(nll_L.detach().sum()), count + len(nll_L)
            if is_training:
                optimizer.zero_grad()
                (nll_L.mean() + orthogonality(adapters.values(), config)).backward()
                optimizer.step()
        losses.append(total / count)
    return losses


def orthogonality(adapters: Iterable[Adapter], config: LoRAConfig) -> torch.Tensor | float:
    """AdaLoRA's orthogonality penalty, factor included.

    The mean over all A and B of the Frobenius norm of the Gram matrix minus I.
    """
    norms = [
        torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
        for adapter in adapters
        if adapter.E is not None
        for gram in (adapter.A @ adapter.A.T, adapter.B.T @ adapter.B)
    ]
    return config.orthogonality * torch.stack([norm.to(norms[0].device) for norm in norms]).mean() if norms else 0.0


def _delta(
    model: nn.Module,
    adapters: dict[str, Adapter],
    written: dict[str, Factor],
    losses: list[float],
    config: LoRAConfig,
) -> Delta:
    """The trained adapter minus the one that the weights hold already."""
    delta = Delta(diagnostics=loss_diagnostics(losses, num_steps=len(losses) - 1))
    for name, adapter in adapters.items():
        trained = adapter.map(lambda tensor: tensor.detach().clone())
        factor = trained.factor(config, is_transposed(model.get_submodule(name)))
        delta.stream_state |= {
            f"{STATE_PREFIX}/{part}/{name}": tensor for part, tensor in trained._asdict().items() if tensor is not None
        }
        if name in written:
            left = torch.cat([factor.left, -written[name].left.to(factor.left)], 1)
            right = torch.cat([factor.right, written[name].right.to(factor.right)], 1)
            factor = Factor(left, right, factor.transposed)
        delta.factors[name] = factor
    delta.diagnostics["update_norm_ratio"] = update_norm_ratio(model, delta)
    return delta


def _adapters_after(model: nn.Module, history: Sequence[Delta], names: Sequence[str]) -> dict[str, Adapter]:
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
        a, b, e = (state.get(f"{STATE_PREFIX}/{part}/{name}") for part in Adapter._fields)
        assert a is not None and b is not None, "written together"
        adapters[name] = Adapter(a.to(device), b.to(device), None if e is None else e.to(device))
    return adapters


def _subtract_output(module: nn.Module, factor: Factor) -> Registration:
    """Register a hook that subtracts a factor's share from a map's output."""

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        share = (args[0].to(factor.right) @ factor.right) @ factor.left.T
        return (at_least_float32(output) - share.to(output.device)).to(output.dtype)

    return Registration(module, hook)


class _Dropout:
    """Dropout whose masks come from a generator of its own.

    The generator is on the device of the masks.
    """

    def __init__(self, share: float, device: torch.device, seed: int, number: int) -> None:
        self.share, self.is_active = share, True
        self._generator = torch.Generator(device).manual_seed(seed * 1_000_003 + 2 * number + 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_active or self.share == 0:
            return x
        kept = torch.rand(x.shape, generator=self._generator, device=x.device) >= self.share
        return x * kept / (1 - self.share)


def initial_adapters(model: nn.Module, names: Sequence[str], config: LoRAConfig) -> dict[str, Adapter]:
    """Adapters that change nothing yet, by module, with peft's distributions; float32 or wider.

    Every module's adapter is drawn from a generator of its own.
    """
    adapters = {}
    for number, name in enumerate(names):
        module = model.get_submodule(name)
        weight = weight_of(module)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + 2 * number)
        width_out, width_in = map_shape(module)
        if config.kind == "adalora":
            a = torch.empty(config.initial_rank, width_in).normal_(0, ADALORA_STD, generator=generator)
            b = torch.empty(width_out, config.initial_rank).normal_(0, ADALORA_STD, generator=generator)
            adapter = Adapter(a, b, torch.zeros(config.initial_rank, 1))
        else:
            bound = 1 / math.sqrt(width_in)  # Kaiming with a = sqrt(5)
            a = torch.empty(config.rank, width_in).uniform_(-bound, bound, generator=generator)
            adapter = Adapter(a, torch.zeros(width_out, config.rank))
        adapters[name] = adapter.map(functools.partial(torch.Tensor.to, device=weight.device, dtype=dtype))
    return adapters


def _add_output(module: nn.Module, adapter: Adapter, dropout: _Dropout, config: LoRAConfig) -> Registration:
    """Register a hook that adds the adapter's output to that of its module."""

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        added = adapter.output(dropout(args[0].to(adapter.A.dtype)), config)
        return (at_least_float32(output) + added).to(output.dtype)

    return Registration(module, hook)
