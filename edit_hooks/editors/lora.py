"""LoRA: a low-rank adapter trained on the edited texts, through peft.

``kind: lora`` (Hu et al.): W x + (alpha / r) B A dropout(x), A [r, f] Kaiming, B [d, r] zero. ``kind: adalora`` (Zhang
et al.), EasyEdit's choice for all models but Qwen2.5: W x + alpha / (r + 1e-5) B (E A) dropout(x), A and B normal with
deviation 0.02, E [r, 1] zero, plus half the mean of ||A A^T - I|| and ||B^T B - I|| over all A and B. There r is
``initial_rank``: the release never calls the rank allocator, so its rank stays 12, and the rank in its files is unused.

The loss is the mean over all target tokens of a chunk; Adam; no early stop. All blocks are adapted unless ``layers`` is
set. The result is B A as low-rank factors: using an edit does not need peft, it acts per row of a batch, and dropout
cannot act when the edited model is used. In a stream the training of one adapter continues, with a new optimizer per
step. A step's delta is the adapter after it minus the adapter before it; the adapter is stored in
``Delta.stream_state``.

Not copied from EasyEdit: it leaves ``use_cache`` off, gradient checkpointing on and the adapters' dropout in training
mode, so its answers after an edit are random; and it gives AdaLoRA no ``total_step``, which peft requires since 0.18
(here: the number of steps, which has no effect without the rank allocator).

Shapes: r rank, f and d input and output width of an adapted map.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.modeling.architectures import Role, architecture_of, is_transposed, num_layers, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE, SHARE_BELOW_ONE

ADAPTER = "edit"  # peft's name of the adapter
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
        if importlib.util.find_spec("peft") is None:
            raise EditingError(
                "editor 'lora' needs peft, which is not installed. Run: pip install \"lm-eval-editing[peft]\""
            )


class Adapter(NamedTuple):
    """The trained tensors of one module: A [r, f], B [d, r], AdaLoRA's E [r, 1]."""

    A: torch.Tensor
    B: torch.Tensor
    E: torch.Tensor | None = None

    def factor(self, config: LoRAConfig, transposed: bool) -> Factor:
        """The update of the weight that equals this adapter."""
        scale = config.alpha / (len(self.A) if self.E is None else len(self.A) + 1e-5)
        right = self.A if self.E is None else self.A * self.E
        return Factor(self.B * scale, right.T, transposed)

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
    with _seeded(model, config.seed), _injected(model, names, config, len(chunks)) as layers:
        adapters = {name: _adapter_of(layer) for name, layer in layers.items()}
        for name, adapter in start.items():
            for parameter, value in zip(adapters[name].tensors, adapter.tensors, strict=True):
                parameter.data.copy_(value)
        # Training continues the adapter that the weights hold, so its share must not act twice.
        with hooks(*(_subtract_output(layers[name].base_layer, factor) for name, factor in written.items())):
            losses = _fit(model, chunks, layers, adapters, config)
    return _delta(model, adapters, written, losses, config)


def _chunks(job: EditJob[LoRAConfig], requests: Sequence[EditRequest]) -> list[LabeledRows]:
    """The requests in batches of ``batch_size``."""
    config = job.config
    rows = [target_row(job.tokenizer, r.text, r.target_new, append_eos=config.append_eos) for r in requests]
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
    layers: dict[str, Any],
    adapters: dict[str, Adapter],
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
        for layer in layers.values():
            layer.train(is_training)
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

    return lambda: module.register_forward_hook(hook)


@contextlib.contextmanager
def _injected(
    model: PreTrainedModel, names: list[str], config: LoRAConfig, num_chunks: int
) -> Iterator[dict[str, Any]]:
    """Replace modules by peft's adapter layers; restore them on exit.

    The adapters are float32 or wider.

    Yields:
        Module name -> adapter layer.
    """
    import peft  # an optional dependency, and slow to import

    originals = {name: model.get_submodule(name) for name in names}
    shared = {
        "target_modules": names,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": is_transposed(originals[names[0]]),
    }
    if config.kind == "adalora":
        num_steps = config.num_steps * num_chunks
        peft_config = peft.AdaLoraConfig(init_r=config.initial_rank, total_step=num_steps, **shared)
    else:
        peft_config = peft.LoraConfig(r=config.rank, **shared)
    try:
        peft.inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER)
        layers = {name: model.get_submodule(name) for name in names}
        for name, layer in layers.items():
            dtype = torch.promote_types(originals[name].weight.dtype, torch.float32)
            for tensor in _adapter_of(layer).tensors:
                tensor.data = tensor.data.to(dtype)
                tensor.requires_grad_(True)
            if config.kind == "adalora":
                layer.ranknum[ADAPTER].data = layer.ranknum[ADAPTER].data.to(dtype)
        yield layers
    finally:
        for name, module in originals.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)
        vars(model).pop("peft_config", None)


def _adapter_of(layer: Any) -> Adapter:
    """The trained parameters of peft's layer."""
    a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if isinstance(a, nn.Linear) and isinstance(b, nn.Linear):
        return Adapter(a.weight, b.weight)
    return Adapter(a, b, layer.lora_E[ADAPTER])


@contextlib.contextmanager
def _seeded(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Seed the global generators; restore them on exit.

    peft draws adapters and dropout masks from them.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(seed)
        yield
