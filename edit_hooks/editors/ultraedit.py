"""UltraEdit: one closed-form step from gradients, with feature statistics that are kept for life.

Method of "UltraEdit: Training-, Subject-, and Memory-Free Lifelong Editing in Large Language Models". For the tokens of
a step (those that predict a token of ``target_new``; T of them over all requests of a joint edit) one forward and one
backward pass give, at every edited linear map, the input h in R^f and the gradient g in R^d of the summed
cross-entropy at its output. With H (T x f) the raw inputs,

    [h^; g^] = ([h; g] - mean) / std,   v = -lr ||h^||^2 g^,   W <- W + V^T H (H^T H + ridge I)^-1      (V: T x d)

mean and std are running statistics over all tokens seen so far, one set per shape of map (layers share it), merged step
by step (Chan's formula) and updated before they are used. By the push-through identity

    H (H^T H + ridge I)^-1 = (H H^T + ridge I)^-1 H,

so only a T x T system is solved (float64) and the update is a factor of rank T.

In a stream the statistics travel in ``Delta.stream_state``. The release starts them from nothing, which leaves a lone
edit
with little (variances over a handful of tokens) or nothing (one token) to normalize by; here they start from
``calibration``, short texts the model writes itself, read at all their positions, so that single edits are defined and
independent of each other. ``calibration: []`` is the release.

Public versions also differ in:

- ``tokens``: ``target`` (the release) or ``all`` fed tokens (a port in EasyEdit);
- ``gradients``: the release takes the mean loss over the target tokens of ``micro_batch_size`` requests (``mean``), so
  that a token's gradient depends on its neighbors; ``sum`` does not. With equal numbers of target tokens the factor
  cancels in g^.

Published runs edit gate and up projections on some models; ``modules`` names them by role (``up``, ``gate``,
``rewrite``) with their blocks. Norms behind the MLP (Gemma, OLMo 2) need no care: gradients already went through them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.labeled_rows import LabeledRow, LabeledRows, batch_rows, label_nll, target_row
from edit_hooks.locate.solve import ridge_keys
from edit_hooks.modeling.architectures import (
    architecture_of,
    is_transposed,
    linear_of,
    map_shape,
    num_layers,
    unwrapped,
    weight_of,
)
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output
from edit_hooks.modeling.sampling import sample_texts
from edit_hooks.modeling.tensors import weight_norm
from edit_hooks.modeling.tokens import encode
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, near_misses

ROLES = ("rewrite", "up", "gate")


CALIBRATION_TEXTS, CALIBRATION_LENGTH = 4, 24  # per seed word, tokens


MAX_TOKENS = 2048


CARRY = "ultraedit"


@dataclass(kw_only=True)
class UltraEditConfig(EditorConfig):
    """Settings of UltraEdit."""

    modules: dict[str, list[int]] | None = config_field(
        "role (rewrite, up, gate) -> blocks; null: the rewrite modules of 'layers'", default=None
    )
    lr: float = config_field("eta, the size of the step", default=1e-6)
    ridge: float = config_field("weight of the identity beside H^T H", default=1.0)
    tokens: Literal["target", "all"] = config_field("positions whose features are used", default="target")
    gradients: Literal["sum", "mean"] = config_field("of which loss over target tokens", default="sum")
    micro_batch_size: int = config_field("requests over which the mean loss is taken", default=10)
    calibration: list[str] | None = config_field(
        "texts the running statistics start from; null: sampled from the model, []: none", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "ridge", "micro_batch_size"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
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
                f"'modules' names blocks {blocks} and 'layers' {self.layers}; give one of them (modules: null "
                "edits the rewrite modules of 'layers')."
            )

    def module_names(self, model: nn.Module) -> list[str]:
        """Full names of the edited maps.

        Raises:
            EditingError: for a role the model's family does not have.
        """
        arch = architecture_of(model)
        assert self.layers is not None
        roles = {"rewrite": arch.rewrite, "up": arch.mlp_in[-1], "gate": arch.mlp_in[0] if arch.mlp_in[1:] else None}
        names = []
        for role, layers in (self.modules or {"rewrite": self.layers}).items():
            template = roles[role]
            if template is None:
                raise EditingError(
                    f"'modules' names {role!r}, but these models have no such map of their own; "
                    f"they have {', '.join(name for name, found in roles.items() if found)}."
                )
            names += [template.format(layer) for layer in layers]
        return names


class Features(NamedTuple):
    """What one request (or text) shows at one map: inputs h [T, f] and output gradients g [T, d], float64."""

    inputs_TF: torch.Tensor
    gradients_TD: torch.Tensor

    @property
    def joined(self) -> torch.Tensor:
        return torch.cat([self.inputs_TF, self.gradients_TD], 1)


@dataclass(frozen=True)
class Statistics:
    """Running mean and sum of squared deviations of [h; g] for one shape of map, float64.

    Attributes:
        count: tokens seen. mean_X, squares_X: over f + d features.
    """

    count: int
    mean_X: torch.Tensor
    squares_X: torch.Tensor

    @classmethod
    def empty(cls, width: int) -> Statistics:
        zeros_X = torch.zeros(width, dtype=torch.float64)
        return cls(0, zeros_X, zeros_X)

    def merged(self, features_TX: torch.Tensor) -> Statistics:
        """The statistics of everything seen so far and of these tokens."""
        features_TX = features_TX.double().to(self.mean_X.device)
        new, total = len(features_TX), self.count + len(features_TX)
        if new == 0:
            return self
        mean_X = features_TX.mean(0)
        squares_X = (features_TX - mean_X).square().sum(0)
        shift_X = mean_X - self.mean_X
        return Statistics(
            total,
            self.mean_X + shift_X * new / total,
            self.squares_X + squares_X + shift_X.square() * self.count * new / total,
        )

    def normalized(self, features_TX: torch.Tensor) -> torch.Tensor:
        """(x - mean) / std with the unbiased variance; features that never varied become zero.

        Raises:
            EditingError: when no variance is defined.
        """
        if self.count < 2:
            raise EditingError(
                "UltraEdit has seen a single token and cannot normalize by its variance; leave 'calibration' out "
                "(null) or give texts, instead of starting from nothing."
            )
        std_X = (self.squares_X / (self.count - 1)).sqrt().to(features_TX.device)
        centered_TX = features_TX - self.mean_X.to(features_TX.device)
        return torch.where(std_X > 0, centered_TX / std_X, 0.0)


class UltraEdit(Editor[UltraEditConfig]):
    """Gradients in, one ridge regression per map out; no subject, no training, no stored edits."""

    name = "ultraedit"
    config_class = UltraEditConfig
    config_folders = ("ultraedit",)
    needs_subject = False
    supports_joint = True
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "lr": 3e-3}

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        super().__init__(overrides)
        self._start: weakref.WeakKeyDictionary[nn.Module, dict[str, Statistics]] = weakref.WeakKeyDictionary()

    def default_layers(self, config: Any) -> list[int]:
        """Blocks from three fifths to four fifths of the depth, about where the published settings are."""
        last = num_layers(config) - 1
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
            self._start[model] = _calibrated(model, tokenizer, config)

    def compute(self, job: EditJob[UltraEditConfig]) -> list[Delta]:
        model, config = job.model, job.config
        names = config.module_names(model)
        examples = [target_row(job.tokenizer, request.text, request.target_new) for request in job.requests]
        features, before = _capture(model, examples, names, config)
        statistics = _carried(job.history) if job.history else self._start[model]
        groups = [list(range(len(examples)))] if job.joint else [[index] for index in range(len(examples))]
        deltas = []
        for group in groups:
            seen = _scaled([features[index] for index in group], [examples[index] for index in group], config)
            delta = _step(model, names, seen, statistics, config)
            deltas.append(delta)
            job.progress(len(group))
        self._diagnose(model, examples, groups, deltas, before)
        return deltas

    @staticmethod
    def _diagnose(
        model: Any, examples: list[LabeledRow], groups: list[list[int]], deltas: list[Delta], before: list[float]
    ) -> None:
        """Losses before and after, and how much was written."""
        for group, delta in zip(groups, deltas, strict=True):
            after = _losses(model, [examples[index] for index in group], delta)
            losses = [sum(before[index] for index in group) / len(group), sum(after) / len(after)]
            ratios = {
                name.removesuffix(".weight"): float(update.norm())
                / weight_norm(linear_of(model.get_submodule(name.removesuffix(".weight"))))
                for name, update in delta.weights().items()
            }
            delta.diagnostics |= {
                "final_loss": losses[1],
                "final_nll": losses[1],
                "initial_nll": losses[0],
                "steps": 1,
                "stop_reason": "steps",
                "losses": [{"loss": loss} for loss in losses],
                "update_norm_ratio": max(ratios.values()),
                "modules": ratios,
            }


# --- rows ------------------------------------------------------------------------------------------------------------


def _text_example(tokenizer: PreTrainedTokenizerBase, text: str) -> LabeledRow | None:
    """A text of which every token should be predicted from those before it; ``None`` for less than two tokens."""
    ids = encode(tokenizer, text).ids
    return LabeledRow(ids[:-1], list(enumerate(ids[1:]))) if len(ids) > 1 else None


def _positions(example: LabeledRow, config: UltraEditConfig) -> list[int]:
    """The positions of a row whose features are used."""
    return list(range(len(example.ids))) if config.tokens == "all" else [column for column, _ in example.labels]


def _rows(model: Any, examples: Sequence[LabeledRow]) -> LabeledRows:
    """Padded rows in which padding sees the text before it (nothing sees padding): a token that sees nothing, as in a
    sliding window full of padding, would make gradients NaN."""
    rows = batch_rows(model, examples)
    return dataclasses.replace(rows, mask_RT=torch.ones_like(rows.mask_RT))


def _chunks(examples: Sequence[LabeledRow]) -> list[list[int]]:
    """Indices of examples run together, similar lengths side by side."""
    lengths = [len(example.ids) for example in examples]
    shortest_first = sorted(range(len(examples)), key=lambda index: lengths[index])
    return list(token_batches(shortest_first, lengths, MAX_TOKENS))


def _capture(
    model: Any, examples: Sequence[LabeledRow], names: Sequence[str], config: UltraEditConfig
) -> tuple[list[dict[str, Features]], list[float]]:
    """Per example its features by map, under the summed loss, and its mean loss."""
    features: list[dict[str, Features]] = [{} for _ in examples]
    means = [0.0] * len(examples)
    inputs: dict[str, torch.Tensor] = {}
    leaves: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def read(hidden: torch.Tensor) -> None:
            inputs[name] = hidden.detach()

        return read

    def add(name: str) -> Any:
        def plus(hidden: torch.Tensor) -> torch.Tensor:
            leaves[name] = torch.zeros_like(hidden, requires_grad=True)  # its gradient is that of the output
            return hidden + leaves[name]

        return plus

    maps = [model.get_submodule(name) for name in names]
    registrations = [on_input(module, keep(name)) for name, module in zip(names, maps, strict=True)]
    registrations += [on_output(module, add(name)) for name, module in zip(names, maps, strict=True)]
    with frozen(model), torch.enable_grad():
        for chunk in _chunks(examples):
            rows = _rows(model, [examples[index] for index in chunk])
            with hooks(*registrations):
                loss_L = label_nll(model, rows)
            gradients = dict(zip(names, torch.autograd.grad(loss_L.sum(), [leaves[n] for n in names]), strict=True))
            for row, index in enumerate(chunk):
                means[index] = float(loss_L.detach()[rows.row_L == row].mean())
                where = _positions(examples[index], config)
                features[index] = {
                    name: Features(inputs[name][row, where].double(), gradients[name][row, where].double())
                    for name in names
                }
            inputs.clear()
            leaves.clear()
    return features, means


@torch.no_grad()
def _losses(model: Any, examples: Sequence[LabeledRow], delta: Delta) -> list[float]:
    """Mean loss of each example under an edit."""
    means = [0.0] * len(examples)
    with frozen(model):
        for chunk in _chunks(examples):
            lone = len(chunk) == 1 and delta.is_low_rank
            scope: Any = PerRowAdapters(model, [delta]) if lone else edited(model, delta)
            rows = _rows(model, [examples[index] for index in chunk])
            with scope:
                loss_L = label_nll(model, rows)
            for row, index in enumerate(chunk):
                means[index] = float(loss_L[rows.row_L == row].mean())
    return means


# --- statistics ------------------------------------------------------------------------------------------------------


def _shape_name(module: nn.Module) -> str:
    width_out, width_in = map_shape(module)
    return f"{width_in}x{width_out}"


def _updated(
    model: nn.Module, names: Sequence[str], statistics: Mapping[str, Statistics], seen: Sequence[Mapping[str, Features]]
) -> dict[str, Statistics]:
    """Statistics by shape with these features in them."""
    new = dict(statistics)
    for name in names:
        shape = _shape_name(model.get_submodule(name))
        for features in seen:
            joined_TX = features[name].joined
            new[shape] = new.get(shape, Statistics.empty(joined_TX.shape[1])).merged(joined_TX)
    return new


def _calibrated(model: Any, tokenizer: PreTrainedTokenizerBase, config: UltraEditConfig) -> dict[str, Statistics]:
    """Where the running statistics start: the calibration texts', or nothing."""
    examples = [found for text in config.calibration or () if (found := _text_example(tokenizer, text)) is not None]
    if not examples:
        return {}
    names = config.module_names(model)
    features, _ = _capture(model, examples, names, config)
    return _updated(model, names, {}, _scaled(features, examples, config))


def _scaled(
    seen: Sequence[dict[str, Features]], examples: Sequence[LabeledRow], config: UltraEditConfig
) -> list[dict[str, Features]]:
    """Gradients of the loss the configuration asks for: the sum, or the mean over a micro-batch's labels."""
    if config.gradients == "sum":
        return list(seen)
    size, scaled = config.micro_batch_size, []
    for index, features in enumerate(seen):
        start = index - index % size
        count = sum(len(example.labels) for example in examples[start : start + size])
        scaled.append({name: Features(part.inputs_TF, part.gradients_TD / count) for name, part in features.items()})
    return scaled


def _carried(history: Sequence[Delta]) -> dict[str, Statistics]:
    """The statistics after the last step of a stream."""
    stream_state = history[-1].stream_state
    shapes = [key.rpartition("/")[2] for key in stream_state if key.startswith(f"{CARRY}/count/")]
    if not shapes:
        raise EditingError("the history's last delta was not made by UltraEdit; a stream has one editor throughout.")
    return {
        shape: Statistics(
            int(stream_state[f"{CARRY}/count/{shape}"]),
            stream_state[f"{CARRY}/mean/{shape}"],
            stream_state[f"{CARRY}/squares/{shape}"],
        )
        for shape in shapes
    }


def _carry(statistics: Mapping[str, Statistics]) -> dict[str, torch.Tensor]:
    stream_state = {}
    for shape, numbers in statistics.items():
        stream_state[f"{CARRY}/count/{shape}"] = torch.tensor(numbers.count)
        stream_state[f"{CARRY}/mean/{shape}"] = numbers.mean_X.cpu()
        stream_state[f"{CARRY}/squares/{shape}"] = numbers.squares_X.cpu()
    return stream_state


# --- the step --------------------------------------------------------------------------------------------------------


def _step(
    model: nn.Module,
    names: Sequence[str],
    seen: Sequence[Mapping[str, Features]],
    statistics: Mapping[str, Statistics],
    config: UltraEditConfig,
) -> Delta:
    """The update for all tokens seen: statistics first, then one regression per map."""
    statistics = _updated(model, names, statistics, seen)
    delta = Delta(stream_state=_carry(statistics))
    with torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            inputs_TF = torch.cat([features[name].inputs_TF for features in seen])
            joined_TX = torch.cat([features[name].joined for features in seen])
            normalized_TX = statistics[_shape_name(module)].normalized(joined_TX)
            width = inputs_TF.shape[1]
            inputs_hat_TF, gradients_hat_TD = normalized_TX[:, :width], normalized_TX[:, width:]
            values_TD = -config.lr * inputs_hat_TF.square().sum(1, keepdim=True) * gradients_hat_TD
            right_TF = ridge_keys(inputs_TF, inputs_TF, config.ridge)
            dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
            factor = Factor(values_TD.T.to(dtype), right_TF.T.to(dtype), is_transposed(module))
            if len(inputs_TF) * sum(map_shape(module)) > weight_of(module).numel():  # the matrix itself is smaller
                delta.dense[f"{name}.weight"] = factor.update()
            else:
                delta.factors[name] = factor
    delta.diagnostics = {"num_tokens": sum(len(features[names[0]].inputs_TF) for features in seen)}
    return delta
