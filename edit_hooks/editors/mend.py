"""MEND: a trained hyper-network maps the gradient of an edit to an update.

Mitchell et al., "Fast Model Editing at Scale". One forward and backward pass of the mean NLL of the target tokens gives
token factors at every edited matrix. The hyper-network (:mod:`edit_hooks.gradient.hypernetwork`) maps them to an update
whose rank is the number of tokens, so an edit acts per row of a batch, and independent edits share all passes. It
has to be trained for the model first (``lm-edit train mend``, :mod:`edit_hooks.training.mend.trainer`) and is refused
on every other model. ``artifact: identity`` is the untrained network: one plain gradient step of size ``edit_lr``.

Joint edits: ``joint_loss: mean`` averages the loss over all target tokens of all edits, as released, so each edit's
gradient is 1/n of those the network was trained on (the release trains with ``edits_per_example`` n). ``sum`` does not
scale them. In a stream the weights change while the network remains that of the unedited model.

Not copied from the releases: the target encoded alone, whose BOS becomes a label (EasyEdit); padding as labels; step
sizes applied in another order than they are stored in, which swaps those of gpt2-xl's two matrices (the copy in ROME's
release).

Shapes: R rows, T tokens, L labels, N tokens of all rows, f and d input and output width of a matrix.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.trained_artifact import TrainingEdits
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import FLOAT32, NOTHING_CARRIED, ROW_TOKENS, Footprint, low_rank_footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.artifact import (
    HYPER_NETWORK,
    artifact_digest,
    load_network,
    read_manifest,
)
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.hypernetwork import HyperNetwork, NetworkSettings, Sign, TokenFactors, drop_zero_tokens
from edit_hooks.gradient.label_forward import ENGINES, LabelForward
from edit_hooks.gradient.labeled_rows import batch_rows, target_row
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.modeling.architectures import Role, architecture_of, is_transposed, map_shape, num_layers
from edit_hooks.modeling.fingerprint.base_model import compare_models
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.hooks import frozen
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

IDENTITY = "identity"


@dataclass(kw_only=True)
class MENDConfig(EditorConfig):
    """Settings of MEND; a trained artifact fixes those from ``layers`` to ``sign``."""

    artifact: str | None = config_field("folder written by lm-edit train mend, or identity (untrained)", default=None)
    artifact_digest: str | None = config_field("set by the editor: checksum of the artifact", default=None)
    modules: list[Role] = config_field(
        "the edited linear maps of a block, in the order of their step sizes",
        default_factory=lambda: ["rewrite", "mlp_in"],
    )
    edit_lr: float = config_field("initial step size of every matrix", within=POSITIVE, default=1e-4)
    rank: int = config_field("rank of the hyper-network's maps", within=POSITIVE, default=1920)
    num_hidden: int = config_field(
        "hidden layers of the hyper-network, which has one block more", within=NON_NEGATIVE, default=1
    )
    normalize: bool = config_field("normalize inputs and gradients with training statistics", default=True)
    sign: Sign = config_field("minus: subtract the update (paper); plus: add it (released code)", default="minus")
    joint_loss: Literal["mean", "sum"] = config_field(
        "loss of a joint edit; mean: over all target tokens; sum: of the edits' means", default="mean"
    )
    batch_size: int = config_field("requests of one backward pass", within=POSITIVE, default=8)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.modules:
            raise EditingError("editor setting 'modules' is empty; name at least one kind of linear map.")

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
    """An update from one gradient, by a hyper-network trained for the model."""

    name = "mend"
    config_class = MENDConfig
    config_folders = ("mend",)
    needs_subject = False
    edits_quantized = True
    supports_joint = True
    reads_past_updates = False
    stream_growth = NOTHING_CARRIED
    trainer = "edit_hooks.training.mend.trainer:MENDTrainer"
    # Untrained: one gradient step.
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "modules": ["rewrite"],
        "artifact": "identity",
        "edit_lr": 0.05,
        "joint_loss": "sum",
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._networks: dict[str, HyperNetwork] = {}
        self._training_edits = TrainingEdits(HYPER_NETWORK)

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        """The last three blocks."""
        return list(range(num_layers(model_config)))[-3:]

    def default_config(self, model: nn.Module) -> MENDConfig:
        config = super().default_config(model)
        path = None if config.artifact == IDENTITY else config.artifact
        config.record_digest("artifact_digest", "artifact", None if path is None else artifact_digest(path))
        if path is not None:
            HYPER_NETWORK.apply_settings(config, self.overrides, path, read_manifest(path))
        return config

    def target_modules(self, config: MENDConfig, model: nn.Module) -> list[str]:
        return list(edited_shapes(model, config))

    def names_layers(self, settings: Settings) -> bool:
        """Also a trained hyper-network determines them; see :meth:`default_config`."""
        return settings.get("artifact") not in (None, IDENTITY) or super().names_layers(settings)

    def check_inputs(self, config: MENDConfig) -> None:
        if config.artifact is None:
            raise EditingError(
                "editor 'mend' needs a hyper-network trained for this model: run lm-edit train mend and pass its "
                "folder as editor_args=artifact:<folder> (artifact:identity: untrained, a plain gradient step)."
            )

    def prepare(self, config: MENDConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.check_inputs(config)
        if config.artifact is not None and config.artifact != IDENTITY:
            recorded, source = read_manifest(config.artifact)["model"], f"the hyper-network in {config.artifact}"
            compare_models(recorded, model_identity(model, tokenizer), source)

    def warnings(self, job: EditJob[MENDConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        config = job.config
        if config.artifact is None or config.artifact == IDENTITY:
            return []
        return self._training_edits.warnings(config.artifact, config.artifact_digest, requests)

    def footprint(self, config: MENDConfig, model: nn.Module) -> Footprint:
        """The hyper-network, one for all matrices of a shape, and an update of one rank per token."""
        names = self.target_modules(config, model)
        widths = [sum(shape) for shape in {map_shape(model.get_submodule(name)) for name in names}]
        entries = sum((config.num_hidden + 1) * 2 * width * min(config.rank, width) for width in widths)
        rest = low_rank_footprint(model, names, config.edited_layers, config, rank=ROW_TOKENS)
        return dataclasses.replace(rest, models=FLOAT32 * entries)

    def compute(self, job: EditJob[MENDConfig]) -> list[Delta]:
        model, config = job.model, job.config
        network = self._network(model, config)
        size = 1 if config.engine == "reference" and not job.joint else config.batch_size
        chunks = [job.requests[i : i + size] for i in range(0, len(job.requests), size)]
        with frozen(model):
            batches = [_batch(job, chunk) for chunk in chunks]
            if job.joint:
                delta = _edit_jointly(model, network, batches, config)
                job.progress(len(job.requests))
                return [delta]
            deltas = []
            for chunk, batch in zip(chunks, batches, strict=True):
                deltas += _edit_independently(model, network, batch)
                job.progress(len(chunk))
        return deltas

    def _network(self, model: PreTrainedModel, config: MENDConfig) -> HyperNetwork:
        """The hyper-network on the model's device, at least in float32."""
        weight = model.get_input_embeddings().weight
        key = f"{config.artifact_digest or config.to_dict()} {weight.device} {weight.dtype}"
        if key not in self._networks:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            if config.artifact == IDENTITY:
                network = HyperNetwork(edited_shapes(model, config), config.network_settings(), dtype)
            else:
                network, _ = load_network(str(config.artifact))
            self._networks[key] = network.to(weight.device, dtype).requires_grad_(False).eval()
        return self._networks[key]


def edited_shapes(model: PreTrainedModel, config: MENDConfig) -> dict[str, tuple[int, int]]:
    """Module name -> (d, f) of the edited matrices, in the order of their step sizes."""
    names = architecture_of(model).all_module_names(config.modules, config.layers or ())
    return {name: map_shape(model.get_submodule(name)) for name in names}


def _batch(job: EditJob[MENDConfig], requests: Sequence[EditRequest]) -> LabelForward:
    config = job.config
    rows = [target_row(job.tokenizer, r.text, r.continuation, append_eos=config.append_eos) for r in requests]
    return ENGINES[config.engine](job.model, batch_rows(job.model, rows), list(edited_shapes(job.model, config)))


def _edit_independently(model: PreTrainedModel, network: HyperNetwork, batch: LabelForward) -> list[Delta]:
    """One delta per row; the rows share the model's passes and that of the network."""
    rows = batch.rows
    factors, before_L = token_factors(model, rows, rows.counts_L(), list(network.shapes), batch.nll)
    is_token_RT = rows.mask_RT.bool()
    deltas = _deltas(
        model, network, [_row_factors(factors, is_token_T, row) for row, is_token_T in enumerate(is_token_RT)]
    )
    after_L = _nll_under_own_delta(model, batch, deltas)
    for row, delta in enumerate(deltas):
        is_own_L = rows.row_L == row
        _record_losses(model, delta, float(before_L[is_own_L].mean()), float(after_L[is_own_L].mean()))
    return deltas


def _row_factors(factors: Mapping[str, TokenFactors], is_token_T: torch.Tensor, row: int) -> dict[str, TokenFactors]:
    """Factors of one row, without padding."""
    return {
        name: TokenFactors(x[row][is_token_T.to(x.device)], delta[row][is_token_T.to(delta.device)])
        for name, (x, delta) in factors.items()
    }


@torch.no_grad()
def _nll_under_own_delta(model: PreTrainedModel, batch: LabelForward, deltas: Sequence[Delta]) -> torch.Tensor:
    """NLL [L] of every label, each row under its own delta."""
    if all(delta.is_low_rank for delta in deltas):
        with PerRowAdapters(model, list(deltas)):
            return batch.nll()
    parts = []
    for row, delta in enumerate(deltas):
        own = copy.copy(batch)
        own.select(torch.arange(len(deltas)) == row)
        with edited(model, delta):
            parts.append(own.nll())
    return torch.cat(parts)  # labels are in the order of the rows


def _edit_jointly(
    model: PreTrainedModel, network: HyperNetwork, batches: Sequence[LabelForward], config: MENDConfig
) -> Delta:
    """One delta for all rows, from one gradient that is summed over the batches."""
    num_labels = sum(len(batch.rows.token_L) for batch in batches)
    parts: dict[str, list[TokenFactors]] = {name: [] for name in network.shapes}
    before = 0.0
    for batch in batches:
        rows = batch.rows
        divisor = rows.counts_L() if config.joint_loss == "sum" else num_labels
        factors, nll_L = token_factors(model, rows, divisor, list(network.shapes), batch.nll)
        before += float(nll_L.sum()) / num_labels
        is_token_RT = rows.mask_RT.bool()
        for name, (x, delta) in factors.items():
            parts[name].append(TokenFactors(x[is_token_RT.to(x.device)], delta[is_token_RT.to(delta.device)]))
    joint_factors = {name: TokenFactors(*map(torch.cat, zip(*chunks, strict=True))) for name, chunks in parts.items()}
    (joint_delta,) = _deltas(model, network, [joint_factors])
    with torch.no_grad(), edited(model, joint_delta):
        after = sum(float(batch.nll().sum()) for batch in batches) / num_labels
    _record_losses(model, joint_delta, before, after)
    return joint_delta


@torch.no_grad()
def _deltas(
    model: PreTrainedModel, network: HyperNetwork, factors: Sequence[Mapping[str, TokenFactors]]
) -> list[Delta]:
    """The network's updates of several edits, with one pass over the tokens of all of them."""
    device = network.step_sizes.device
    kept = [{name: drop_zero_tokens(tokens) for name, tokens in edit.items()} for edit in factors]
    together = {
        name: TokenFactors(
            torch.cat([edit[name].x for edit in kept]).to(device),
            torch.cat([edit[name].delta for edit in kept]).to(device),
        )
        for name in network.shapes
    }
    deltas = [Delta() for _ in kept]
    for name, (left, right) in network(together).items():
        counts = [len(edit[name].x) for edit in kept]
        for delta, own_left, own_right in zip(deltas, left.split(counts, 1), right.split(counts, 1), strict=True):
            _add_update(delta, name, Factor(own_left, own_right, is_transposed(model.get_submodule(name))))
    return deltas


def _add_update(delta: Delta, name: str, factor: Factor) -> None:
    """Add an update as factors where they are smaller than the matrix."""
    left, right = factor.left, factor.right
    if left.numel() + right.numel() < len(left) * len(right):
        # Copies, or every edit would keep the factors of all edits of its batch.
        delta.factors[name] = factor._replace(left=left.clone(), right=right.clone())
    else:
        delta.dense[f"{name}.weight"] = factor.update()


def _record_losses(model: PreTrainedModel, delta: Delta, before: float, after: float) -> None:
    delta.diagnostics = {
        **loss_diagnostics([before, after], num_steps=1),
        "update_norm_ratio": update_norm_ratio(model, delta),
    }
