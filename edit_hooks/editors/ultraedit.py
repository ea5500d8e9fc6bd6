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

In a stream the statistics are stored in ``Delta.stream_state``. The release starts them empty, reads the requests of a
step in micro-batches, longest request first, and takes the gradients of each micro-batch's mean loss, so a token's
gradient depends on the other requests. Its variance adds T times the unbiased variance of each micro-batch
(``variance: released``), which makes updates smaller than the exact rule does: by (T / (T - 1))^1.5 for a lone edit.
``start: empty`` is the release. Two of its results are not reproduced: where the number of requests is no multiple of
the micro-batch it sets the gradients of the last one to zero, and a micro-batch with one target token gives NaN.

From an empty start a lone edit is normalized by the variance over its own few tokens. ``start: calibrated`` starts
from ``calibration`` instead: short texts sampled from the model, read at all positions, with the exact variance and
gradients of the summed loss (unless ``variance`` and ``gradients`` are set), so that lone edits are defined for targets
of one token and a token's gradient does not depend on other requests. It is this package's own variant, and the
default only for edits made alone (``start: calibrated_alone``); batches and streams run as released.

The first step of a stream through ``edit`` is an edit made alone if it is not ``joint``. It is calibrated, but leaves
the released statistics of its own tokens, without the calibration, so every later step follows the release.
``joint=True`` or ``start: empty`` makes the first step the release's, too. A joint first step of a single token, whose
variance is undefined, is made as one alone unless ``start`` is ``empty``.

The release's ``lr`` of 1e-6 belongs to its models: on others it may change nothing at all. Without an ``lr`` the step
is relative, also an own variant: all maps of an update of n requests are scaled by one factor, after which the update
has ``relative_update * sqrt(n)`` times the norm of the weights it changes.

``tokens`` are the ``target`` tokens (the release) or ``all`` input tokens (a port in EasyEdit).

Published runs edit gate and up projections on some models; ``modules`` names them by role (``up``, ``gate``,
``rewrite``) with their blocks. Norms after the MLP (Gemma, OLMo 2) need no special treatment: gradients pass through
them.

Shapes: T tokens of a step, f and d input and output width of a map, X = f + d features.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.feature_statistics import (
    FEWEST_TOKENS,
    Features,
    FeatureStatistics,
    VarianceRule,
    load_statistics,
    save_statistics,
)
from edit_hooks.gradient.labeled_rows import LabeledRow, label_nll, target_row, unmasked_batch
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.locate.moments.solve import ridge_keys
from edit_hooks.modeling.architectures import (
    architecture_of,
    is_transposed,
    map_shape,
    num_layers,
    require_distinct,
    unwrapped,
    weight_of,
)
from edit_hooks.modeling.forward.sampling import sample_texts
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode
from edit_hooks.modeling.weights import weight_norm
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

ROLES = ("rewrite", "up", "gate")
CALIBRATION_TEXTS, CALIBRATION_LENGTH = 4, 24  # per seed word, tokens
MAX_TOKENS = 2048


@dataclass(kw_only=True)
class UltraEditConfig(EditorConfig):
    """Settings of UltraEdit."""

    layers: list[int] | None = config_field(
        "blocks whose rewrite module is edited, ascending", within=NON_NEGATIVE, instead_of="modules", default=None
    )
    modules: dict[str, list[int]] | None = config_field(
        "role (rewrite, up, gate) -> blocks; null: the rewrite modules of 'layers'",
        within=NON_NEGATIVE,
        instead_of="layers",
        default=None,
    )
    lr: float | None = config_field(
        "eta, the size of the step; null: relative_update", within=POSITIVE, instead_of="relative_update", default=None
    )
    relative_update: float = config_field(
        "without an lr: norm of a request's update over that of the weights it changes",
        within=POSITIVE,
        instead_of="lr",
        default=0.006,
    )
    ridge: float = config_field("weight of the identity that is added to H^T H", within=POSITIVE, default=1.0)
    tokens: Literal["target", "all"] = config_field(
        "positions whose features are used; target: those that predict a target token", default="target"
    )
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)
    start: Literal["calibrated_alone", "calibrated", "empty"] = config_field(
        "running statistics at the start; empty: released; calibrated: of the calibration texts; calibrated_alone: "
        "calibrated for edits made alone, empty for batches, streams and whatever follows an edit made alone",
        default="calibrated_alone",
    )
    variance: VarianceRule | None = config_field(
        "variance of the running statistics; null: released from an empty start, pooled from a calibrated one",
        default=None,
    )
    gradients: Literal["sum", "mean"] | None = config_field(
        "loss behind the gradients: the sum over target tokens, or the mean over those of a micro-batch; null: mean "
        "from an empty start (released), sum from a calibrated one",
        default=None,
    )
    micro_batch_size: int = config_field("gradients=mean: requests of a micro-batch", within=POSITIVE, default=10)
    calibration: list[str] | None = config_field(
        "texts of a calibrated start; null: sampled from the model; []: none, as start: empty", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration == []:
            self.start = "empty"
        if self.modules is None:
            return
        for role, layers in self.modules.items():
            if role not in ROLES:
                raise EditingError(f"'modules' names {role!r}.{near_misses(role, ROLES)} Roles: {', '.join(ROLES)}.")
            require_distinct("modules", layers)
        blocks = sorted({layer for layers in self.modules.values() for layer in layers})
        if self.layers is None:
            self.layers = blocks
        if self.layers != blocks:
            raise EditingError(
                f"'modules' names blocks {blocks} and 'layers' {self.layers}; set one of them (modules: null edits "
                "the rewrite modules of 'layers')."
            )

    def check_given(self, names: Collection[str]) -> None:
        # Results record 'layers' beside 'modules'; __post_init__ compares them.
        super().check_given(set(names) - {"layers"} if self.modules is not None else names)

    def module_names(self, model: nn.Module) -> list[str]:
        """Full names of the edited maps.

        Raises:
            EditingError: the model's family has no map of a role.
        """
        arch = architecture_of(model)
        names = []
        for role, layers in (self.modules or {"rewrite": self.edited_layers}).items():
            for layer in layers:
                maps = arch.module_names("rewrite" if role == "rewrite" else "mlp_in", layer)
                if role == "gate" and len(maps) == 1:
                    raise EditingError(
                        "'modules' names 'gate', but these models have no separate map for it; they have rewrite, up."
                    )
                names.append(maps[0] if role == "gate" else maps[-1])
        return names


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
    reads_past_updates = False
    stream_growth = StreamGrowth("the statistics of features: 2 (f + d) numbers of eight bytes per shape of map", "no")
    # By default an edit made alone and a batch of it start from different statistics.
    contract_settings: ClassVar[Settings] = {"layers": [1], "lr": 3e-3, "start": "calibrated"}

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

    def target_modules(self, config: UltraEditConfig, model: nn.Module) -> list[str]:
        return config.module_names(model)

    def names_layers(self, settings: Settings) -> bool:
        return settings.get("modules") is not None or super().names_layers(settings)

    def layer_settings(self, model: nn.Module) -> dict[str, Any]:
        config = self.default_config(model)
        return super().layer_settings(model) if config.modules is None else {"modules": config.modules}

    def guesses(self, config: UltraEditConfig) -> Sequence[str]:
        if config.lr is not None or "relative_update" in self.overrides:
            return []
        size = f"updates {config.relative_update:g} times the norm of the weights they change"
        return [f"no lr is known for it, and a fixed one may change nothing or everything: {size}"]

    def fill_sampled_settings(
        self, config: UltraEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> UltraEditConfig:
        if config.calibration is None and config.start != "empty":
            texts = sample_texts(model, tokenizer, CALIBRATION_TEXTS, CALIBRATION_LENGTH, config.seed)
            config = dataclasses.replace(config, calibration=texts)
        return config

    def prepare(self, config: UltraEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compute the statistics of a calibrated start, with the weights of this moment."""
        if config.start != "empty":
            with torch.inference_mode(False):
                self._start[model] = _calibrate(model, tokenizer, config)

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        """The statistics after the last step are all that the next one reads."""
        return [Delta(stream_state=history[-1].stream_state)] if history else []

    def compute(self, job: EditJob[UltraEditConfig]) -> list[Delta]:
        model, config = job.model, job.config
        names = config.module_names(model)
        rows = [
            target_row(job.tokenizer, request.text, request.continuation, append_eos=config.append_eos)
            for request in job.requests
        ]
        # A stream writes lone requests jointly, too; one token has no variance to start from.
        has_variance = sum(len(_feature_positions(row, config)) for row in rows) >= FEWEST_TOKENS
        is_alone = not job.history and not (job.joint and has_variance)
        is_calibrated = config.start == "calibrated" or (is_alone and config.start == "calibrated_alone")
        rules = Rules.of(config, is_calibrated)
        at_start = self._start[model] if is_calibrated else {}
        statistics = load_statistics(job.history[-1].stream_state) if job.history else at_start
        features = _capture(model, rows, names, config)
        deltas = []
        indices = list(range(len(rows)))
        for group in [indices] if job.joint else [[index] for index in indices]:
            batches = rules.micro_batches([(rows[index], features[index]) for index in group])
            delta = _step(model, names, batches, statistics, config, rules, len(group))
            losses_after = _losses_under(model, [rows[index] for index in group], delta)
            before = sum(features[index].mean_loss for index in group) / len(group)
            _diagnose(model, delta, before, sum(losses_after) / len(group))
            if is_calibrated and config.start == "calibrated_alone":
                released = Rules.of(config, is_calibrated=False)
                own = released.micro_batches([(rows[index], features[index]) for index in group])
                delta.stream_state = save_statistics(_merge_features(model, names, {}, own, released))
            delta.diagnostics["start"] = "calibrated" if is_calibrated else "empty"
            deltas.append(delta)
            job.progress(len(group))
        return deltas


class Rules(NamedTuple):
    """How tokens enter the statistics: with ``variance``, from gradients of the sum or the micro-batch's mean loss."""

    variance: VarianceRule
    gradients: Literal["sum", "mean"]
    micro_batch_size: int

    @classmethod
    def of(cls, config: UltraEditConfig, is_calibrated: bool) -> Rules:
        return cls(
            config.variance or ("pooled" if is_calibrated else "released"),
            config.gradients or ("sum" if is_calibrated else "mean"),
            config.micro_batch_size,
        )

    def micro_batches(self, rows: Sequence[tuple[LabeledRow, RowFeatures]]) -> list[dict[str, Features]]:
        """Features by map, one mapping per micro-batch; the longest rows come first."""
        longest_first = sorted(rows, key=lambda row: len(row[0].ids), reverse=True)  # stable, as in the release
        batches = []
        for start in range(0, len(rows), self.micro_batch_size):
            batch = longest_first[start : start + self.micro_batch_size]
            count = sum(len(row.labels) for row, _ in batch) if self.gradients == "mean" else 1
            parts = [features.by_module for _, features in batch]
            batches.append(
                {
                    name: Features(
                        torch.cat([part[name].inputs_TF for part in parts]),
                        torch.cat([part[name].gradients_TD for part in parts]) / count,
                    )
                    for name in parts[0]
                }
            )
        return batches


# -- the step ----------------------------------------------------------------------------------------------------------


def _step(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[Mapping[str, Features]],
    statistics: Mapping[str, FeatureStatistics],
    config: UltraEditConfig,
    rules: Rules,
    num_requests: int,
) -> Delta:
    """The update for all tokens: statistics first, then one regression per map."""
    statistics = _merge_features(model, names, statistics, batches, rules)
    delta = Delta(stream_state=save_statistics(statistics))
    with torch.no_grad():
        factors = {
            name: _regress(model.get_submodule(name), [batch[name] for batch in batches], statistics, config)
            for name in names
        }
        if config.lr is None:
            factors = _scaled(model, factors, config.relative_update * num_requests**0.5)
        for name, factor in factors.items():
            weight = weight_of(model.get_submodule(name))
            if factor.left.numel() + factor.right.numel() > weight.numel():  # the matrix itself is smaller
                delta.dense[f"{name}.weight"] = factor.update()
            else:
                delta.factors[name] = factor
    delta.diagnostics = {"num_tokens": sum(len(batch[names[0]].inputs_TF) for batch in batches)}
    return delta


def _scaled(model: nn.Module, factors: Mapping[str, Factor], ratio: float) -> dict[str, Factor]:
    """Factors scaled alike, so that the whole update has ``ratio`` times the norm of the weights it changes."""
    # ||L R^T||^2 = <L^T L, R^T R>: the update itself need not be formed.
    squares = [((one.left.T @ one.left) * (one.right.T @ one.right)).sum() for one in factors.values()]
    update = sum(float(square) for square in squares) ** 0.5
    weights = sum(weight_norm(model.get_submodule(name)) ** 2 for name in factors) ** 0.5
    scale = ratio * weights / update if update > 0 else 0.0
    return {name: factor._replace(left=factor.left * scale) for name, factor in factors.items()}


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
    lr = config.lr if config.lr is not None else 1.0  # a relative step is scaled afterwards
    values_TD = -lr * inputs_hat_TF.square().sum(1, keepdim=True) * gradients_hat_TD
    right_TF = ridge_keys(inputs_TF, inputs_TF, config.ridge)
    dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
    return Factor(values_TD.T.to(dtype), right_TF.T.to(dtype), is_transposed(module))


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
            batch = unmasked_batch(model, [rows[index] for index in chunk])
            factors, nll_L = token_factors(model, batch, 1, names)
            losses = _means(nll_L, [rows[index] for index in chunk])
            for row, index in enumerate(chunk):
                positions = _feature_positions(rows[index], config)
                by_module = {
                    name: Features(x[row, positions].double(), delta[row, positions].double())
                    for name, (x, delta) in factors.items()
                }
                captured[index] = RowFeatures(by_module, losses[row])
    return [captured[index] for index in range(len(rows))]


@torch.no_grad()
def _losses_under(model: PreTrainedModel, rows: Sequence[LabeledRow], delta: Delta) -> list[float]:
    """Mean loss of each row under an edit."""
    losses = [0.0] * len(rows)
    with frozen(model):
        for chunk in _chunks(rows):
            is_alone = len(chunk) == 1 and delta.is_low_rank
            batch = unmasked_batch(model, [rows[index] for index in chunk])
            with PerRowAdapters(model, [delta]) if is_alone else edited(model, delta):
                nll_L = label_nll(model, batch)
            for index, loss in zip(chunk, _means(nll_L, [rows[index] for index in chunk]), strict=True):
                losses[index] = loss
    return losses


def _means(nll_L: torch.Tensor, rows: Sequence[LabeledRow]) -> list[float]:
    """Mean of every row's labels, with one read of their device."""
    parts = nll_L.detach().split([len(row.labels) for row in rows])
    return torch.stack([part_L.mean() for part_L in parts]).tolist()


def _feature_positions(row: LabeledRow, config: UltraEditConfig) -> list[int]:
    return list(range(len(row.ids))) if config.tokens == "all" else [column for column, _ in row.labels]


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
    batches: Sequence[Mapping[str, Features]],
    rules: Rules,
) -> dict[str, FeatureStatistics]:
    """Statistics by shape of map, with these features merged into them, one micro-batch after the other."""
    merged = dict(statistics)
    for batch in batches:
        for name in names:
            shape = _shape_name(model.get_submodule(name))
            joined_TX = batch[name].joined
            earlier = merged.get(shape, FeatureStatistics.empty(joined_TX.shape[1]))
            merged[shape] = earlier.merge(joined_TX, rules.variance)
    return merged


def _calibrate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: UltraEditConfig
) -> dict[str, FeatureStatistics]:
    """Statistics of the calibration texts."""
    rows = [row for text in config.calibration or () if (row := _text_row(tokenizer, text)) is not None]
    names = config.module_names(model)
    rules = Rules.of(config, is_calibrated=True)
    batches = rules.micro_batches(list(zip(rows, _capture(model, rows, names, config), strict=True)))
    return _merge_features(model, names, {}, batches, rules)


def _text_row(tokenizer: PreTrainedTokenizerBase, text: str) -> LabeledRow | None:
    """A text with every token but the first as a label; ``None`` for fewer than two tokens."""
    ids = encode(tokenizer, text).ids
    return LabeledRow(ids[:-1], list(enumerate(ids[1:]))) if len(ids) > 1 else None
