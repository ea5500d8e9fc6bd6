"""UltraEdit: one closed-form step from gradients and running statistics.

"UltraEdit: Training-, Subject-, and Memory-Free Lifelong Editing in Large Language Models". For the tokens of a step
(the T positions that predict a token of ``target_new``, over all requests of a joint edit) one forward and one backward
pass give, at every edited linear map, the input h in R^f and the gradient g in R^d of the summed cross-entropy at its
output. With H (T x f) the raw inputs,

    [h^; g^] = ([h; g] - mean) / std,   v = -lr ||h^||^2 g^,   W <- W + V^T H (H^T H + ridge I)^-1      (V: T x d)

mean and std are running statistics over all tokens seen so far, one set per shape of map (layers share it), merged step
by step (Chan's formula) and updated before they are used. By the push-through identity

    H (H^T H + ridge I)^-1 = (H H^T + ridge I)^-1 H,

so only a T x T system is solved (float64) and the update is a factor of rank T.

In a stream the statistics are stored in ``Delta.stream_state``. The release starts them empty, so a single edit is
normalized by the variance over a handful of tokens, or cannot be normalized (one token). Here they start from
``calibration``: short texts sampled from the model, read at all positions. Single edits are then defined and
independent of each other. ``calibration: []`` is the release.

Public versions also differ in these settings:

- ``tokens``: ``target`` (the release) or ``all`` input tokens (a port in EasyEdit);
- ``gradients``: the release takes the mean loss over the target tokens of ``micro_batch_size`` requests (``mean``), so
  a token's gradient depends on the other requests; with ``sum`` it does not. With equal numbers of target tokens the
  factor cancels in g^.

Published runs edit gate and up projections on some models; ``modules`` names them by role (``up``, ``gate``,
``rewrite``) with their blocks. Norms after the MLP (Gemma, OLMo 2) need no special treatment: gradients pass through
them.

Shapes: T tokens of a step, f and d input and output width of a map, X = f + d features.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.feature_statistics import FeatureStatistics
from edit_hooks.gradient.labeled_rows import LabeledRow, LabeledRows, batch_rows, label_nll, target_row
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.locate.solve import ridge_keys
from edit_hooks.modeling.architectures import (
    architecture_of,
    is_transposed,
    map_shape,
    num_layers,
    unwrapped,
    weight_of,
)
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.sampling import sample_texts
from edit_hooks.modeling.tokens import encode
from edit_hooks.modeling.weights import weight_norm
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE

ROLES = ("rewrite", "up", "gate")


CALIBRATION_TEXTS, CALIBRATION_LENGTH = 4, 24  # per seed word, tokens


MAX_TOKENS = 2048


STATE_PREFIX = "ultraedit"  # of the statistics in saved edits


@dataclass(kw_only=True)
class UltraEditConfig(EditorConfig):
    """Settings of UltraEdit."""

    modules: dict[str, list[int]] | None = config_field(
        "role (rewrite, up, gate) -> blocks; null: the rewrite modules of 'layers'", within=NON_NEGATIVE, default=None
    )
    lr: float = config_field("eta, the size of the step", within=POSITIVE, default=1e-6)
    ridge: float = config_field("weight of the identity that is added to H^T H", within=POSITIVE, default=1.0)
    tokens: Literal["target", "all"] = config_field(
        "positions whose features are used; target: those that predict a target token", default="target"
    )
    gradients: Literal["sum", "mean"] = config_field(
        "loss behind the gradients: the sum over target tokens, or the mean over those of a micro-batch (released)",
        default="sum",
    )
    micro_batch_size: int = config_field("gradients=mean: requests of a micro-batch", within=POSITIVE, default=10)
    calibration: list[str] | None = config_field(
        "texts the running statistics start from; null: sampled from the model, []: none (released)", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modules is None:
            return
        for role in self.modules:
            if role not in ROLES:
                raise EditingError(f"'modules' names {role!r}.{near_misses(role, ROLES)} Roles: {', '.join(ROLES)}.")
        blocks = sorted({layer for layers in self.modules.values() for layer in layers})
        if self.layers is None:
            self.layers = blocks
        if self.layers != blocks:
            raise EditingError(
                f"'modules' names blocks {blocks} and 'layers' {self.layers}; set one of them (modules: null edits "
                "the rewrite modules of 'layers')."
            )

    def module_names(self, model: nn.Module) -> list[str]:
        """Full names of the edited maps.

        Raises:
            EditingError: the model's family has no map of a role.
        """
        arch = architecture_of(model)
        templates = {
            "rewrite": arch.rewrite,
            "up": arch.mlp_in[-1],
            "gate": arch.mlp_in[0] if arch.mlp_in[1:] else None,
        }
        names = []
        for role, layers in (self.modules or {"rewrite": self.edited_layers}).items():
            template = templates[role]
            if template is None:
                raise EditingError(
                    f"'modules' names {role!r}, but these models have no separate map for it; they have "
                    f"{', '.join(name for name, path in templates.items() if path)}."
                )
            names += [template.format(layer) for layer in layers]
        return names


class Features(NamedTuple):
    """Inputs h [T, f] and output gradients g [T, d] of one text at one map, float64."""

    inputs_TF: torch.Tensor
    gradients_TD: torch.Tensor

    @property
    def joined(self) -> torch.Tensor:
        return torch.cat([self.inputs_TF, self.gradients_TD], 1)


class RowFeatures(NamedTuple):
    """Features of one row by module name, and the row's mean loss."""

    by_module: dict[str, Features]
    mean_loss: float


class UltraEdit(Editor[UltraEditConfig]):
    """One ridge regression per map from gradients; no subject, no training."""

    name = "ultraedit"
    config_class = UltraEditConfig
    config_folders = ("ultraedit",)
    needs_subject = False
    edits_quantized = True
    supports_joint = True
    contract_settings: ClassVar[Settings] = {"layers": [1], "lr": 3e-3}

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._start: weakref.WeakKeyDictionary[nn.Module, dict[str, FeatureStatistics]] = weakref.WeakKeyDictionary()

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        """Blocks from three to four fifths of the depth, near the published settings."""
        last = num_layers(model_config) - 1
        return list(range(round(0.6 * last), round(0.8 * last) + 1))

    def default_config(self, model: nn.Module) -> UltraEditConfig:
        config = super().default_config(model)
        config.module_names(unwrapped(model))
        return config

    def fill_sampled_settings(
        self, config: UltraEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> UltraEditConfig:
        if config.calibration is None:
            texts = sample_texts(model, tokenizer, CALIBRATION_TEXTS, CALIBRATION_LENGTH, config.seed)
            config = dataclasses.replace(config, calibration=texts)
        return config

    def prepare(self, config: UltraEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start the statistics, with the weights of this moment."""
        with torch.inference_mode(False):
            self._start[model] = _calibrate(model, tokenizer, config)

    def compute(self, job: EditJob[UltraEditConfig]) -> list[Delta]:
        model, config = job.model, job.config
        names = config.module_names(model)
        statistics = _statistics_after(job.history) if job.history else self._start[model]
        rows = [target_row(job.tokenizer, request.text, request.continuation) for request in job.requests]
        features = _capture(model, rows, names, config)
        indices = list(range(len(rows)))
        deltas = []
        for group in [indices] if job.joint else [[index] for index in indices]:
            group_rows = [rows[index] for index in group]
            group_features = [features[index] for index in group]
            scaled = _scale_gradients(group_features, group_rows, config)
            delta = _step(model, names, scaled, statistics, config)
            losses_after = _losses_under(model, group_rows, delta)
            before = sum(row.mean_loss for row in group_features) / len(group)
            _diagnose(model, delta, before, sum(losses_after) / len(group))
            deltas.append(delta)
            job.progress(len(group))
        return deltas


# -- the step ----------------------------------------------------------------------------------------------------------


def _step(
    model: nn.Module,
    names: Sequence[str],
    features: Sequence[Mapping[str, Features]],
    statistics: Mapping[str, FeatureStatistics],
    config: UltraEditConfig,
) -> Delta:
    """The update for all tokens: statistics first, then one regression per map."""
    statistics = _merge_features(model, names, statistics, features)
    delta = Delta(stream_state=_stream_state(statistics))
    with torch.no_grad():
        for name in names:
            factor = _regress(model.get_submodule(name), [row[name] for row in features], statistics, config)
            weight = weight_of(model.get_submodule(name))
            if factor.left.numel() + factor.right.numel() > weight.numel():  # the matrix itself is smaller
                delta.dense[f"{name}.weight"] = factor.update()
            else:
                delta.factors[name] = factor
    delta.diagnostics = {"num_tokens": sum(len(row[names[0]].inputs_TF) for row in features)}
    return delta


def _regress(
    module: nn.Module,
    features: Sequence[Features],
    statistics: Mapping[str, FeatureStatistics],
    config: UltraEditConfig,
) -> Factor:
    """The update of one map, as a factor of rank T."""
    inputs_TF = torch.cat([row.inputs_TF for row in features])
    normalized_TX = statistics[_shape_name(module)].normalize(torch.cat([row.joined for row in features]))
    inputs_hat_TF, gradients_hat_TD = normalized_TX.tensor_split([inputs_TF.shape[1]], dim=1)
    values_TD = -config.lr * inputs_hat_TF.square().sum(1, keepdim=True) * gradients_hat_TD
    right_TF = ridge_keys(inputs_TF, inputs_TF, config.ridge)
    dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
    return Factor(values_TD.T.to(dtype), right_TF.T.to(dtype), is_transposed(module))


def _scale_gradients(
    features: Sequence[RowFeatures], rows: Sequence[LabeledRow], config: UltraEditConfig
) -> list[dict[str, Features]]:
    """Features with the gradients of the configured loss.

    The sum over labels, or the mean over those of a micro-batch.
    """
    if config.gradients == "sum":
        return [row.by_module for row in features]
    size, scaled = config.micro_batch_size, []
    for index, row in enumerate(features):
        start = index - index % size
        count = sum(len(other.labels) for other in rows[start : start + size])
        scaled.append(
            {name: Features(part.inputs_TF, part.gradients_TD / count) for name, part in row.by_module.items()}
        )
    return scaled


def _diagnose(model: nn.Module, delta: Delta, before: float, after: float) -> None:
    """Record mean losses and the relative size of every update."""
    ratios = {}
    for parameter, update in delta.weights().items():
        name = parameter.removesuffix(".weight")
        ratios[name] = float(update.norm()) / weight_norm(model.get_submodule(name))
    delta.diagnostics |= {
        **loss_diagnostics([before, after], num_steps=1),
        "final_nll": after,
        "update_norm_ratio": max(ratios.values()),
        "modules": ratios,
    }


# -- features ----------------------------------------------------------------------------------------------------------


def _capture(
    model: PreTrainedModel, rows: Sequence[LabeledRow], names: Sequence[str], config: UltraEditConfig
) -> list[RowFeatures]:
    """Features of every row under the summed loss."""
    captured: dict[int, RowFeatures] = {}
    with frozen(model):
        for chunk in _chunks(rows):
            batch = _unmasked_batch(model, [rows[index] for index in chunk])
            factors, nll_L = token_factors(model, batch, 1, names)
            for row, index in enumerate(chunk):
                positions = _feature_positions(rows[index], config)
                by_module = {
                    name: Features(x[row, positions].double(), delta[row, positions].double())
                    for name, (x, delta) in factors.items()
                }
                captured[index] = RowFeatures(by_module, float(nll_L[batch.row_L == row].mean()))
    return [captured[index] for index in range(len(rows))]


@torch.no_grad()
def _losses_under(model: PreTrainedModel, rows: Sequence[LabeledRow], delta: Delta) -> list[float]:
    """Mean loss of each row under an edit."""
    losses = [0.0] * len(rows)
    with frozen(model):
        for chunk in _chunks(rows):
            is_alone = len(chunk) == 1 and delta.is_low_rank
            batch = _unmasked_batch(model, [rows[index] for index in chunk])
            with PerRowAdapters(model, [delta]) if is_alone else edited(model, delta):
                nll_L = label_nll(model, batch)
            for row, index in enumerate(chunk):
                losses[index] = float(nll_L[batch.row_L == row].mean())
    return losses


def _feature_positions(row: LabeledRow, config: UltraEditConfig) -> list[int]:
    return list(range(len(row.ids))) if config.tokens == "all" else [column for column, _ in row.labels]


def _unmasked_batch(model: PreTrainedModel, rows: Sequence[LabeledRow]) -> LabeledRows:
    """Padded rows whose padding attends to the text before it.

    A position that attends to nothing, as in a sliding window full of padding, would make gradients NaN.
    """
    batch = batch_rows(model, rows)
    return dataclasses.replace(batch, mask_RT=torch.ones_like(batch.mask_RT))


def _chunks(rows: Sequence[LabeledRow]) -> list[list[int]]:
    """Indices of rows that share a forward pass, by length."""
    lengths = [len(row.ids) for row in rows]
    shortest_first = sorted(range(len(rows)), key=lambda index: lengths[index])
    return list(token_batches(shortest_first, lengths, MAX_TOKENS))


# -- statistics --------------------------------------------------------------------------------------------------------


def _shape_name(module: nn.Module) -> str:
    width_out, width_in = map_shape(module)
    return f"{width_in}x{width_out}"


def _merge_features(
    model: nn.Module,
    names: Sequence[str],
    statistics: Mapping[str, FeatureStatistics],
    features: Sequence[Mapping[str, Features]],
) -> dict[str, FeatureStatistics]:
    """Statistics by shape of map, with these features merged into them."""
    merged = dict(statistics)
    for name in names:
        shape = _shape_name(model.get_submodule(name))
        for row in features:
            joined_TX = row[name].joined
            merged[shape] = merged.get(shape, FeatureStatistics.empty(joined_TX.shape[1])).merge(joined_TX)
    return merged


def _calibrate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: UltraEditConfig
) -> dict[str, FeatureStatistics]:
    """Statistics of the calibration texts; none without texts."""
    rows = [row for text in config.calibration or () if (row := _text_row(tokenizer, text)) is not None]
    if not rows:
        return {}
    names = config.module_names(model)
    features = _scale_gradients(_capture(model, rows, names, config), rows, config)
    return _merge_features(model, names, {}, features)


def _text_row(tokenizer: PreTrainedTokenizerBase, text: str) -> LabeledRow | None:
    """A text with every token but the first as a label.

    ``None`` for fewer than two tokens.
    """
    ids = encode(tokenizer, text).ids
    return LabeledRow(ids[:-1], list(enumerate(ids[1:]))) if len(ids) > 1 else None


def _statistics_after(history: Sequence[Delta]) -> dict[str, FeatureStatistics]:
    """The statistics after the last step of a stream."""
    stream_state = history[-1].stream_state
    shapes = [key.rpartition("/")[2] for key in stream_state if key.startswith(f"{STATE_PREFIX}/count/")]
    if not shapes:
        raise EditingError("the history's last delta was not made by UltraEdit; a stream has one editor throughout.")
    return {
        shape: FeatureStatistics(
            int(stream_state[f"{STATE_PREFIX}/count/{shape}"]),
            stream_state[f"{STATE_PREFIX}/mean/{shape}"],
            stream_state[f"{STATE_PREFIX}/squares/{shape}"],
        )
        for shape in shapes
    }


def _stream_state(statistics: Mapping[str, FeatureStatistics]) -> dict[str, torch.Tensor]:
    stream_state = {}
    for shape, numbers in statistics.items():
        stream_state[f"{STATE_PREFIX}/count/{shape}"] = torch.tensor(numbers.count)
        stream_state[f"{STATE_PREFIX}/mean/{shape}"] = numbers.mean_X.cpu()
        stream_state[f"{STATE_PREFIX}/squares/{shape}"] = numbers.squares_X.cpu()
    return stream_state
