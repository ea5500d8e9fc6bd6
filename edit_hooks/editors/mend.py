"""MEND: a trained hyper-network turns the gradient of one edit into an update that generalizes.

Mitchell et al., "Fast Model Editing at Scale". One forward and backward of the mean NLL of the target tokens gives
token factors at every edited matrix; the hyper-network (:mod:`edit_hooks.gradient.hypernetwork`) maps them to an
update of rank number of tokens, so that an edit acts per row of a batch and independent edits share a backward pass. It
has to be trained for the model first (``lm-edit train-mend``, :mod:`edit_hooks.training.mend_trainer`) and is
refused on any other.
``artifact: identity`` is the untrained network: one plain gradient step of size ``edit_lr``.

Joint edits: ``joint_loss: mean`` averages the loss over all target tokens of all edits, as released, which makes each
edit's gradient 1/n of what the network was trained on (train with ``edits_per_example`` n as the release does);
``sum`` keeps every edit's own. In a stream the weights change and the network stays that of the unedited model.

Not copied from the releases: the target encoded alone, whose BOS becomes a label (EasyEdit); pads as labels; step sizes
applied in another order than they are stored in, which swaps those of gpt2-xl's two matrices (ROME's copy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.artifact import (
    artifact_digest,
    edit_digest,
    load_network,
    read_manifest,
    read_training_digests,
)
from edit_hooks.gradient.hypernetwork import HyperNetwork, NetworkSettings, Sign, TokenFactors
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.modeling.architectures import Role, architecture_of, is_transposed, map_shape, num_layers, unwrapped
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.modeling.hooks import frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

IDENTITY = "identity"


TRAINED_ON_IT = (
    "the hyper-network was trained on this very edit, so its scores say nothing about edits it has not seen; evaluate "
    "on others."
)


@dataclass(kw_only=True)
class MENDConfig(EditorConfig):
    """Settings of MEND. What a trained artifact fixes (from ``layers`` to ``sign``) is taken from it."""

    artifact: str | None = config_field(
        "folder written by lm-edit train-mend, or identity (untrained)", default=None, formerly="artefact"
    )
    artifact_digest: str | None = config_field("filled in: checksum of the artifact", default=None)
    modules: list[Role] = config_field(
        "the edited linear maps of a block, in the order of their step sizes",
        default_factory=lambda: ["rewrite", "mlp_in"],
    )
    edit_lr: float = config_field("step size of every matrix at the start", default=1e-4)
    rank: int = config_field("rank of the hyper-network's maps", default=1920)
    num_hidden: int = config_field("hidden layers of the hyper-network; it has one block more", default=1)
    normalize: bool = config_field(
        "normalize inputs and gradients with training statistics", default=True, formerly="normalise"
    )
    sign: Sign = config_field("minus: subtract the update (paper); plus: add it (released code)", default="minus")
    joint_loss: Literal["mean", "sum"] = config_field(
        "joint edits: mean over all target tokens, or sum of edits' means", default="mean"
    )
    batch_size: int = config_field("requests of one backward pass", default=8)
    append_eos: bool = config_field("the end-of-text token follows the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "batch_size"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if self.num_hidden < 0 or not self.modules:
            raise EditingError("editor settings 'num_hidden' (0 or more) and 'modules' (not empty).")

    def network_settings(self) -> NetworkSettings:
        return NetworkSettings(
            rank=self.rank,
            num_blocks=self.num_hidden + 1,
            normalize=self.normalize and self.artifact != IDENTITY,
            step_size=self.edit_lr,
            sign=self.sign,
            seed=self.seed,
        )


class MEND(Editor[MENDConfig]):
    """Model editing with gradient decomposition; needs a hyper-network trained for the model."""

    name = "mend"
    config_class = MENDConfig
    config_folders = ("mend",)
    needs_subject = False
    supports_joint = True
    # Untrained: one gradient step.
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [1],
        "modules": ["rewrite"],
        "artifact": "identity",
        "edit_lr": 0.05,
        "joint_loss": "sum",
    }

    def __init__(self, overrides: Any = None) -> None:
        super().__init__(overrides)
        self._networks: dict[str, HyperNetwork] = {}
        self._seen: dict[str | None, frozenset[int]] = {}

    def default_layers(self, config: Any) -> list[int]:
        """The last three blocks."""
        return list(range(num_layers(config)))[-3:]

    def default_config(self, model: nn.Module) -> MENDConfig:
        config = super().default_config(model)
        if config.artifact is not None and config.artifact != IDENTITY:
            manifest = read_manifest(config.artifact)
            config.artifact_digest = artifact_digest(config.artifact)
            self._take_over(config, manifest)
            found = model_fingerprint(unwrapped(model))
            if manifest["model"] != found:
                raise EditingError(
                    f"the hyper-network in {config.artifact} was trained for another model: {manifest['model_name']} "
                    f"({manifest['model_type']}, {manifest['dtype']}, fingerprint {manifest['model'][:16]}...), this "
                    f"model has {found[:16]}.... Train one for it; weights of another precision are another model."
                )
        return config

    def prepare(self, config: MENDConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        if config.artifact is None:
            raise EditingError(
                "editor 'mend' needs a hyper-network trained for this model: run lm-edit train-mend and give its "
                "folder as editor_args=artifact:<folder> (artifact:identity: untrained, a plain gradient step)."
            )

    def warnings(self, job: EditJob[MENDConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        config = job.config
        if config.artifact is None or config.artifact == IDENTITY:
            return []
        if config.artifact_digest not in self._seen:
            self._seen[config.artifact_digest] = read_training_digests(config.artifact)
        seen = self._seen[config.artifact_digest]
        return [TRAINED_ON_IT] if any(edit_digest(r.text, r.target_new) in seen for r in requests) else []

    def _take_over(self, config: MENDConfig, manifest: dict[str, Any]) -> None:
        """Use the artifact's settings; one that the user set otherwise is an error."""
        for name, value in manifest["editor"].items():
            if name in self.overrides and getattr(config, name) != value:
                raise EditingError(
                    f"editor setting {name!r} is {getattr(config, name)!r}, but the hyper-network in "
                    f"{config.artifact} was trained with {value!r}; drop the setting or train another one."
                )
            setattr(config, name, value)

    def compute(self, job: EditJob[MENDConfig]) -> list[Delta]:
        model, config = job.model, job.config
        network = self._network(model, config)
        chunks = [job.requests[i : i + config.batch_size] for i in range(0, len(job.requests), config.batch_size)]
        with frozen(model):
            rows = [self._rows(model, job.tokenizer, chunk, config) for chunk in chunks]
            if job.joint:
                delta = _joint(model, network, rows, config)
                job.progress(len(job.requests))
                return [delta]
            deltas = []
            for chunk, padded in zip(chunks, rows, strict=True):
                deltas += _independent(model, network, padded)
                job.progress(len(chunk))
        return deltas

    @staticmethod
    def _rows(
        model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: list[EditRequest], config: MENDConfig
    ) -> LabeledRows:
        rows = batch_rows(
            model, [target_row(tokenizer, r.text, r.target_new, append_eos=config.append_eos) for r in requests]
        )
        if config.engine == "fast" and config.layers:
            cache_lower_blocks(model, rows, min(config.layers))
        return rows

    def _network(self, model: Any, config: MENDConfig) -> HyperNetwork:
        """The hyper-network on the model's device, at least in float32."""
        weight = model.get_input_embeddings().weight
        key = f"{config.artifact_digest or config.to_dict()} {weight.device} {weight.dtype}"
        if key not in self._networks:
            if config.artifact == IDENTITY:
                network = HyperNetwork(edited_shapes(model, config), config.network_settings())
            else:
                network, _ = load_network(str(config.artifact))
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._networks[key] = network.to(weight.device, dtype).requires_grad_(False).eval()
        return self._networks[key]


def edited_shapes(model: Any, config: MENDConfig) -> dict[str, tuple[int, int]]:
    """Module name -> (d, f) of the edited matrices, in the order of their step sizes."""
    arch = architecture_of(model)
    names = [n for layer in config.layers or () for role in config.modules for n in arch.module_names(role, layer)]
    return {name: map_shape(model.get_submodule(name)) for name in names}


def token_factors(
    model: nn.Module, rows: LabeledRows, divisor: torch.Tensor | int, names: Sequence[str]
) -> tuple[dict[str, TokenFactors], torch.Tensor]:
    """Inputs and output gradients of modules from one backward of ``sum(nll / divisor)``; also the nll [l].

    Returns:
        Module name -> x [r, t, f] and delta [r, t, d], detached, at least float32. A row's factors are those of its own
        labels, because rows do not see one another.
    """
    inputs: dict[str, torch.Tensor] = {}
    probes: dict[str, torch.Tensor] = {}

    def register(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            inputs[name] = args[0].detach()
            probes[name] = torch.zeros_like(output, requires_grad=True)
            return output + probes[name]

        return lambda: model.get_submodule(name).register_forward_hook(hook)

    with torch.enable_grad(), hooks(*map(register, names)):
        nll_L = label_nll(model, rows)
        gradients = torch.autograd.grad((nll_L / divisor).sum(), [probes[name] for name in names])
    found = {
        name: TokenFactors(at_least_float32(inputs[name]), at_least_float32(gradient))
        for name, gradient in zip(names, gradients, strict=True)
    }
    return found, nll_L.detach()


def _independent(model: Any, network: HyperNetwork, rows: LabeledRows) -> list[Delta]:
    """One delta per row."""
    names = list(network.shapes)
    factors, nll_L = token_factors(model, rows, rows.counts_L(), names)
    deltas = []
    for row in range(len(rows.ids_RT)):
        kept = rows.mask_RT[row].bool()
        tokens = {
            name: TokenFactors(x[row][kept.to(x.device)], d[row][kept.to(d.device)]) for name, (x, d) in factors.items()
        }
        deltas.append(_delta(model, network, tokens))
    with torch.no_grad():
        if all(delta.is_low_rank for delta in deltas):
            with PerRowAdapters(model, list(deltas)):
                after_L = label_nll(model, rows)
        else:
            after_L = torch.empty_like(nll_L)
            for row, delta in enumerate(deltas):
                with edited(model, delta):
                    after_L[rows.row_L == row] = label_nll(model, rows)[rows.row_L == row]
    for row, delta in enumerate(deltas):
        own_L = rows.row_L == row
        _report(model, delta, float(nll_L[own_L].mean()), float(after_L[own_L].mean()))
    return deltas


def _joint(model: Any, network: HyperNetwork, chunks: list[LabeledRows], config: MENDConfig) -> Delta:
    """One delta for all rows: one gradient, gathered chunk by chunk."""
    names = list(network.shapes)
    num_labels = sum(len(rows.token_L) for rows in chunks)
    gathered: dict[str, list[TokenFactors]] = {name: [] for name in names}
    before = 0.0
    for rows in chunks:
        divisor = rows.counts_L() if config.joint_loss == "sum" else num_labels
        factors, nll_L = token_factors(model, rows, divisor, names)
        before += float(nll_L.sum()) / num_labels
        kept = rows.mask_RT.bool()
        for name, (x, gradient) in factors.items():
            gathered[name].append(TokenFactors(x[kept.to(x.device)], gradient[kept.to(gradient.device)]))
    tokens = {name: TokenFactors(*map(torch.cat, zip(*parts, strict=True))) for name, parts in gathered.items()}
    delta = _delta(model, network, tokens)
    with torch.no_grad(), edited(model, delta):
        after = sum(float(label_nll(model, rows).sum()) for rows in chunks) / num_labels
    _report(model, delta, before, after)
    return delta


@torch.no_grad()
def _delta(model: Any, network: HyperNetwork, tokens: dict[str, TokenFactors]) -> Delta:
    """The hyper-network's update, as factors where they are smaller than the matrix."""
    home = network.step_sizes.device
    updates = network({name: TokenFactors(x.to(home), delta.to(home)) for name, (x, delta) in tokens.items()})
    delta = Delta()
    for name, (left, right) in updates.items():
        factor = Factor(left, right, is_transposed(model.get_submodule(name)))
        if left.numel() + right.numel() < len(left) * len(right):
            delta.factors[name] = factor
        else:
            delta.dense[f"{name}.weight"] = factor.update()
    return delta


def _report(model: Any, delta: Delta, before: float, after: float) -> None:
    delta.diagnostics = {
        "initial_nll": before,
        "final_loss": after,
        "steps": 1,
        "stop_reason": "steps",
        "update_norm_ratio": update_norm_ratio(model, delta),
        "losses": [{"loss": before}, {"loss": after}],
    }
