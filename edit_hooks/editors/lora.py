"""LoRA: train a low-rank adapter on the edited texts; the baseline of the editing frameworks, through peft.

``kind: lora`` (Hu et al.): W x + (alpha / r) B A dropout(x), A [r, f] Kaiming, B [d, r] zero. ``kind: adalora`` (Zhang
et al.), as EasyEdit's files have it for all models but Qwen: W x + alpha / (r + 1e-5) B (E A) dropout(x), A and B
normal with deviation 0.02, E [r, 1] zero, plus half the mean of ||A A^T - I|| and ||B^T B - I|| over all A and B. There
r is ``initial_rank``: the release never calls the rank allocator, so its rank stays 12, and the rank of its files is
unused.

The loss is the mean over all target tokens of a chunk; Adam; no early stop. All blocks are adapted unless ``layers``
says otherwise. The result is B A as low-rank factors, so an edit needs no peft to be used, acts per row of a batch, and
dropout can play no part in answering. In a stream one adapter goes on being trained, with a new optimizer per step; a
step's delta is the adapter after it minus the adapter before it, and the adapter travels in ``Delta.stream_state``.

Not copied from EasyEdit: it leaves ``use_cache`` off, gradient checkpointing on and the dropout of its adapters in
training mode, so its answers after an edit are random; and it gives AdaLoRA no ``total_step``, which peft refuses since
0.18 (here: the number of steps, which nothing reads).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.modeling.architectures import Role, architecture_of, is_transposed, num_layers, weight_of
from edit_hooks.modeling.hooks import frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

ADAPTER, CARRY = "edit", "adapter"


@dataclass(kw_only=True)
class LoRAConfig(EditorConfig):
    """Settings of the adapter; ``layers`` are all blocks unless given."""

    kind: Literal["lora", "adalora"] = config_field("which adapter", default="lora")
    modules: list[Role] = config_field("the adapted linear maps of a block", default_factory=lambda: ["query_value"])
    rank: int = config_field("rank of kind=lora", default=8)
    initial_rank: int = config_field("rank of kind=adalora, where it stays", default=12)
    alpha: float = config_field("scale of the adapter, in units of its rank", default=32.0)
    dropout: float = config_field("dropout of the adapter's input while it is trained", default=0.1)
    orthogonality: float = config_field(
        "kind=adalora: factor of the penalty that keeps A and B orthogonal", default=0.5
    )
    num_steps: int = config_field("passes over the requests", default=60)
    lr: float = config_field("Adam learning rate", default=5e-3)
    weight_decay: float = config_field("Adam's L2 penalty", default=0.0)
    batch_size: int = config_field("requests per step of a joint edit", default=8)
    append_eos: bool = config_field("train the end-of-text token after the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "initial_rank", "alpha", "num_steps", "lr", "batch_size"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if not 0 <= self.dropout < 1:
            raise EditingError(f"editor setting 'dropout' is {self.dropout!r}; a share from 0 to below 1 is needed.")
        if not self.modules:
            raise EditingError("editor setting 'modules' is empty; name at least one kind of linear map.")
        if importlib.util.find_spec("peft") is None:
            raise EditingError(
                "editor 'lora' needs peft, which is not installed. Run: pip install \"lm-eval-editing[peft]\""
            )


class Adapter(NamedTuple):
    """The trained tensors of one module: A [r, f], B [d, r], and the singular values E [r, 1] of AdaLoRA."""

    A: torch.Tensor
    B: torch.Tensor
    E: torch.Tensor | None = None

    def factor(self, config: LoRAConfig, transposed: bool) -> Factor:
        """The update this adapter amounts to."""
        scale = config.alpha / (len(self.A) if self.E is None else len(self.A) + 1e-5)
        right = self.A if self.E is None else self.A * self.E
        return Factor(self.B * scale, right.T, transposed)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Adapter:
        """The adapter with every tensor changed."""
        return Adapter(change(self.A), change(self.B), None if self.E is None else change(self.E))


class LoRA(Editor[LoRAConfig]):
    """A LoRA or AdaLoRA adapter trained on the requests."""

    name = "lora"
    config_class = LoRAConfig
    config_folders = ("lora",)
    needs_subject = False
    supports_joint = True
    # The published module is the attention's input; here the module that the other editors write.
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [1],
        "modules": ["rewrite"],
        "num_steps": 8,
        "lr": 2e-2,
        "rank": 2,
    }

    def default_layers(self, config: Any) -> list[int]:
        return list(range(num_layers(config)))

    def compute(self, job: EditJob[LoRAConfig]) -> list[Delta]:
        model, config = job.model, job.config
        arch = architecture_of(model)
        names = [
            name for layer in config.edited_layers for role in config.modules for name in arch.module_names(role, layer)
        ]
        for name in names:
            if hasattr(model.get_submodule(name), "base_layer"):
                raise EditingError(
                    f"{name} carries an adapter already; merge it into the weights (merge_and_unload) before "
                    "editing with 'lora', or use another editor."
                )
        before = _carried(model, job.history, names) if job.history else None
        deltas = []
        with frozen(model):
            for group in job.groups:
                deltas.append(self._train(job, group, names, before))
                job.progress(len(group))
        return deltas

    def _train(
        self,
        job: EditJob[LoRAConfig],
        requests: list[EditRequest],
        names: list[str],
        before: dict[str, Adapter] | None,
    ) -> Delta:
        model, config = job.model, job.config
        examples = [target_row(job.tokenizer, r.text, r.target_new, append_eos=config.append_eos) for r in requests]
        chunks = [
            batch_rows(model, examples[start : start + config.batch_size])
            for start in range(0, len(examples), config.batch_size)
        ]
        for chunk in chunks if config.engine == "fast" else ():
            cache_lower_blocks(model, chunk, min(config.edited_layers))
        transposed = is_transposed(model.get_submodule(names[0]))
        written = {name: adapter.factor(config, transposed) for name, adapter in (before or {}).items()}
        with _own_random_numbers(model, config.seed), _injected(model, names, config, len(chunks)) as layers:
            adapters = {name: _adapter_of(layer) for name, layer in layers.items()}
            for name, adapter in (before or {}).items():
                for parameter, value in zip(adapters[name], adapter, strict=True):
                    if parameter is not None and value is not None:
                        parameter.data.copy_(value)
            # The weights hold the adapter of the steps before; it is trained on, so it must not act twice.
            with hooks(*(_withheld(layers[name].base_layer, factor) for name, factor in written.items())):
                losses = _fit(model, chunks, layers, adapters, config)
        return _delta(model, adapters, written, losses, config)


def _fit(
    model: nn.Module,
    chunks: list[LabeledRows],
    layers: dict[str, Any],
    adapters: dict[str, Adapter],
    config: LoRAConfig,
) -> list[float]:
    """Train in place; returns the mean loss per target token of every pass, and at last without dropout."""
    parameters = [p for adapter in adapters.values() for p in adapter if p is not None]
    optimizer = torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    losses = []
    for step in range(config.num_steps + 1):
        last = step == config.num_steps
        for layer in layers.values():
            layer.train(not last)
        total = count = 0.0
        for chunk in chunks:
            with torch.set_grad_enabled(not last):
                nll_L = label_nll(model, chunk)
            total, count = total + float(nll_L.detach().sum()), count + len(nll_L)
            if not last:
                optimizer.zero_grad()
                (nll_L.mean() + orthogonality(adapters.values(), config)).backward()
                optimizer.step()
        losses.append(total / count)
    return losses


def orthogonality(adapters: Iterable[Adapter], config: LoRAConfig) -> torch.Tensor | float:
    """AdaLoRA's penalty, factor included: the mean over all A and B of the Frobenius norm of their Gram minus I."""
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
    factors: dict[str, Factor] = {}
    stream_state: dict[str, torch.Tensor] = {}
    for name, adapter in adapters.items():
        kept = adapter.mapped(lambda tensor: tensor.detach().clone())
        module = model.get_submodule(name)
        factor = kept.factor(config, is_transposed(module))
        stream_state |= {
            f"{CARRY}/{part}/{name}": t for part, t in zip(Adapter._fields, kept, strict=True) if t is not None
        }
        if name in written:
            left = torch.cat([factor.left, -written[name].left.to(factor.left)], 1)
            right = torch.cat([factor.right, written[name].right.to(factor.right)], 1)
            factor = Factor(left, right, factor.transposed)
        factors[name] = factor
    delta = Delta(
        factors=factors,
        stream_state=stream_state,
        diagnostics={
            "initial_nll": losses[0],
            "final_loss": losses[-1],
            "steps": len(losses) - 1,
            "stop_reason": "steps",
            "losses": [{"loss": loss} for loss in losses],
        },
    )
    delta.diagnostics["update_norm_ratio"] = update_norm_ratio(model, delta)
    return delta


def _carried(model: nn.Module, history: Sequence[Delta], names: Sequence[str]) -> dict[str, Adapter]:
    """The adapter after the last step of a stream, on the devices of the modules."""
    kept = history[-1].stream_state
    if any(f"{CARRY}/A/{name}" not in kept for name in names):
        raise EditingError(
            "the last delta of the history holds no adapter for these modules; a stream has one editor and one "
            "configuration throughout."
        )
    adapters = {}
    for name in names:
        device = weight_of(model.get_submodule(name)).device
        a, b, e = (kept.get(f"{CARRY}/{part}/{name}") for part in Adapter._fields)
        assert a is not None and b is not None, "checked above, and written together"
        adapters[name] = Adapter(a.to(device), b.to(device), None if e is None else e.to(device))
    return adapters


def _withheld(module: nn.Module, factor: Factor) -> Any:
    """Registration of a hook that takes a written factor's share out of a linear map's output."""

    def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        x = args[0]
        share = (x.to(factor.right) @ factor.right) @ factor.left.T
        return (at_least_float32(output) - share.to(output.device)).to(output.dtype)

    return lambda: module.register_forward_hook(hook)


@contextlib.contextmanager
def _injected(model: Any, names: list[str], config: LoRAConfig, num_chunks: int) -> Iterator[dict[str, Any]]:
    """Inside, peft's adapter layers (float32 or wider) stand in for the named modules; outside, they are themselves."""
    import peft  # an extra, and slow to import

    own = {name: model.get_submodule(name) for name in names}
    shared = {
        "target_modules": names,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": is_transposed(own[names[0]]),
    }
    chosen: Any
    if config.kind == "adalora":
        steps = config.num_steps * num_chunks
        chosen = peft.AdaLoraConfig(init_r=config.initial_rank, total_step=steps, **shared)
    else:
        chosen = peft.LoraConfig(r=config.rank, **shared)
    try:
        peft.inject_adapter_in_model(chosen, model, adapter_name=ADAPTER)
        layers = {name: model.get_submodule(name) for name in names}
        for name, layer in layers.items():
            dtype = torch.promote_types(own[name].weight.dtype, torch.float32)
            for tensor in _adapter_of(layer):
                if tensor is not None:
                    tensor.data = tensor.data.to(dtype)
                    tensor.requires_grad_(True)
            if config.kind == "adalora":
                layer.ranknum[ADAPTER].data = layer.ranknum[ADAPTER].data.to(dtype)
        yield layers
    finally:
        for name, module in own.items():
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
def _own_random_numbers(model: Any, seed: int) -> Iterator[None]:
    """peft draws its adapters, and dropout its masks, from the global generators: seeded inside, as before outside."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(seed)
        yield
