"""CrispEdit: fine-tuning whose gradients are kept out of the directions that general text depends on.

"CrispEdit: Low-Curvature Projections for Scalable Non-Destructive LLM Editing" (2602.15823). Several MLP output
projections are trained together, as by LocFT-BF in large shuffled batches, without the end-of-text token and with the
mean over all target tokens of a batch as loss. Before each Adam step the gradient of every map is projected by K-FAC
factors of general text (:mod:`edit_hooks.gradient.curvature.kfac`):

    G <- P(G),   P removes the entries of G in the eigenbases of A and B whose curvature b_i a_j is at least tau.

As in the release, Adam sees the projected gradient and rescales its entries, so a part of the update leaves the free
subspace (``outside_share`` in the diagnostics; .11 to .57 on tiny models). ``projected: step`` projects what Adam
steps instead, as projected gradient descent in the paper would; it is this package's own.

In a stream (:class:`_CrispRule`) the factors of the edits so far join those of the general text, weighted by tokens:

    A <- (n_0 A_0 + n_e A_e) / (n_0 + n_e),   the same for B,

where A_e are means over all positions of prompt and target of the past edits, read after their own step. Adam keeps
its moments between steps, and the new projection is applied to the first of them. This is ``sequential`` of the
release. Its default there, ``mix``, reads up to 1,000 past edits and the general text again after each step, and is not
offered. Nor is the recomputation of factors during an edit, which is off there by default. Only joint edits carry
state.

Other differences: the release drops labels with token id 0, which pads its batches ("!" in Llama 3), from the factors;
it shuffles a stream once, before its steps, where ``shuffle`` here orders the requests of each pass.

Shapes: f and d input and output width of a map.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import CONTRACT_TEXTS
from edit_hooks.base.footprint import FLOAT32, FLOAT64, Footprint, StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.ft_m import FineTuningEditor, FTConfig, TrainingRule
from edit_hooks.gradient.curvature.kfac import CurvatureProjection, FactorSums, KFACFactors, factors_of_documents
from edit_hooks.gradient.labeled_rows import LabeledRows, target_row
from edit_hooks.gradient.weight_copies import BlockCopies, WeightCopies
from edit_hooks.locate.moments.corpora import check_source, digest_of
from edit_hooks.locate.moments.moment_documents import check_length
from edit_hooks.locate.moments.text_statistics import StatisticsKind, TextSettings, text_statistics
from edit_hooks.modeling.architectures import architecture_of, map_shape, num_layers, unwrapped
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE, POSITIVE_SHARE
from edit_hooks.utils.storage.hashing import key_of

KIND = StatisticsKind("K-FAC factors", "lm-eval-editing/kfac-factors/1", "factors")
NUM_DEFAULT_LAYERS, LAST_DEPTH = 5, 0.72
FIRST, SECOND, STEP, EDITS, NUM_TOKENS = "first", "second", "step", "edits", "num_tokens"  # in Delta.stream_state


@dataclass(kw_only=True)
class CrispEditConfig(FTConfig):
    """Settings of the training and of the projection."""

    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=32)
    train_bias: bool = config_field("also train the bias where the module has one", default=False)
    shuffle: bool = config_field(
        "shuffle the requests of a joint edit with the seed before every pass, each order from the one before",
        default=True,
    )
    energy: float = config_field(
        "gamma: share of the curvature that is protected; the released command line has 0.9, its examples 0.8",
        within=POSITIVE_SHARE,
        default=0.9,
    )
    projected: Literal["gradient", "step"] = config_field(
        "gradient: before Adam, as released; step: what Adam steps, so that the update stays in the free subspace",
        default="gradient",
    )
    stream_factors: Literal["averaged", "fixed"] = config_field(
        "factors of later steps of a stream; averaged: those of the past edits join the first; fixed: the first",
        default="averaged",
    )
    factors: Any = config_field(
        "general text behind the factors: self (text of the model), published (Wikipedia articles), a text file or "
        "folder, a hub data set, or a list of texts",
        default="self",
    )
    factor_tokens: int | None = config_field(
        "number of tokens of it; null: 16 per dimension of the keys, or all of a file and of published",
        within=POSITIVE,
        default=None,
    )
    factor_length: int | None = config_field(
        "tokens used of each document, at most the model's context; the release has 512; null: up to 256, all of it "
        "for published",
        within=POSITIVE,
        default=None,
    )
    factor_digest: str | None = config_field(
        "set by the editor: checksum of the file or folder behind the factors", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trained == "block":
            raise EditingError("crisp_edit projects gradients of linear maps; trained=block is not possible.")


class CrispEdit(FineTuningEditor[CrispEditConfig]):
    """Fine-tuning with gradients outside of the directions of high curvature."""

    name = "crisp_edit"
    config_class = CrispEditConfig
    config_folders = ("crisp_edit",)
    stream_growth = StreamGrowth(
        "per map the moments of Adam and the factors of past edits: 2 d f + d^2 + f^2 numbers (1.4 GB at Llama 3 8B)",
        "once, with the second edit",
    )
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 5e-3,
        "factors": CONTRACT_TEXTS,
        "factor_tokens": 300,
        "energy": 0.5,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._factors: weakref.WeakKeyDictionary[nn.Module, dict[int, KFACFactors]] = weakref.WeakKeyDictionary()
        self._projections: weakref.WeakKeyDictionary[nn.Module, dict[str, CurvatureProjection]]
        self._projections = weakref.WeakKeyDictionary()
        # Of the last step: the factors of past edits that they were made from.
        self._merged: weakref.WeakKeyDictionary[nn.Module, tuple[str, dict[str, CurvatureProjection]]]
        self._merged = weakref.WeakKeyDictionary()

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        """Five consecutive blocks up to about three quarters of the depth, as published."""
        last = round(LAST_DEPTH * (num_layers(model_config) - 1))
        return list(range(max(0, last - NUM_DEFAULT_LAYERS + 1), last + 1))

    def default_config(self, model: nn.Module) -> CrispEditConfig:
        config = super().default_config(model)
        is_path = isinstance(config.factors, (str, os.PathLike))
        config.record_digest("factor_digest", "factors", digest_of(config.factors) if is_path else None)
        check_length(model, config.factor_length, KIND.what, "factor_length")
        return config

    def check_inputs(self, config: CrispEditConfig) -> None:
        check_source(config.factors)

    def prepare(self, config: CrispEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        settings = TextSettings(config.factors, config.factor_tokens, config.factor_length, config.seed)
        stored = text_statistics(
            model,
            tokenizer,
            config.edited_layers,
            settings,
            KIND,
            lambda layers: FactorSums(model, layers, config.engine),
        )
        factors = {layer: KFACFactors.of(one.matrices, one.report["num_tokens"]) for layer, one in stored.items()}
        self._factors[model] = factors
        self._projections[model] = _projections(model, factors, config.energy)

    def footprint(self, config: CrispEditConfig, model: nn.Module) -> Footprint:
        shapes = [map_shape(model.get_submodule(name)) for name in self.target_modules(config, model)]
        squares = [width_out**2 + width_in**2 for width_out, width_in in shapes]
        masks = sum(width_out * width_in for width_out, width_in in shapes)
        statistics = (FLOAT32 + FLOAT64) * sum(squares) + masks
        return replace(super().footprint(config, model), statistics=statistics, solve=FLOAT32 * max(squares))

    def rule(self, job: EditJob[CrispEditConfig]) -> _CrispRule:
        if not job.history:
            return _CrispRule(job, self._projections[job.model], None)
        _require_moments(job.history[-1])
        edits = self._edit_factors(job) if job.config.stream_factors == "averaged" else None
        if edits is None:
            return _CrispRule(job, self._projections[job.model], None)
        return _CrispRule(job, self._merged_projections(job, edits), edits)

    def _merged_projections(
        self, job: EditJob[CrispEditConfig], edits: Mapping[int, KFACFactors]
    ) -> dict[str, CurvatureProjection]:
        """The projections with the factors of past edits; kept, since eigenbases take f^3 operations per map.

        The factors stay the same after steps that changed nothing, and when a step is made again.
        """
        digest = key_of(
            [[layer, one.num_tokens, *map(tensor_digest, one.matrices().values())] for layer, one in edits.items()]
        )
        known = self._merged.get(job.model)
        if known is None or known[0] != digest:
            merged = {layer: one.merged(edits[layer]) for layer, one in self._factors[job.model].items()}
            known = digest, _projections(job.model, merged, job.config.energy)
            self._merged[job.model] = known
        return known[1]

    def _edit_factors(self, job: EditJob[CrispEditConfig]) -> dict[int, KFACFactors] | None:
        """Factors over all past edits: those before the last step as stored, of the last step at the present weights.

        ``None`` if no edit was made, as after steps without a usable request.
        """
        last = job.history[-1]
        requests = [EditRequest.from_dict(record) for record in last.meta.get("requests", ())]
        state = last.stream_state
        stored = {
            layer: KFACFactors(
                state[f"{EDITS}/input/{layer}"],
                state[f"{EDITS}/gradient/{layer}"],
                int(state[f"{EDITS}/{NUM_TOKENS}/{layer}"]),
            )
            for layer in job.config.edited_layers
            if f"{EDITS}/input/{layer}" in state
        }
        if not requests:
            return stored or None
        rows = [
            target_row(
                job.tokenizer, request.text, request.continuation, append_eos=job.config.append_eos, feed_last=True
            )
            for request in requests
        ]
        new = factors_of_documents(job.model, [row.ids for row in rows], job.config.edited_layers, job.config.engine)
        return {layer: factors.merged(stored.get(layer)) for layer, factors in new.items()}

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        """The last step without its update: its state holds what all earlier steps left."""
        return [replace(history[-1], factors={}, dense={}, masks={})] if history else []

    def most_state_bytes(self, model: nn.Module) -> int | None:
        config = self._resolved[unwrapped(model)]
        shapes = [map_shape(unwrapped(model).get_submodule(name)) for name in self.target_modules(config, model)]
        moments = sum(2 * width_out * width_in for width_out, width_in in shapes)
        factors = sum(width_out**2 + width_in**2 for width_out, width_in in shapes)
        return FLOAT32 * (moments + factors)


class _CrispRule(TrainingRule[CrispEditConfig]):
    """Projected steps of Adam, which goes on from the step before.

    Args:
        projections: by parameter. edits: factors over the past edits, by layer, for the state of a stream.
    """

    has_plain_steps = False

    def __init__(
        self,
        job: EditJob[CrispEditConfig],
        projections: Mapping[str, CurvatureProjection],
        edits: Mapping[int, KFACFactors] | None,
    ) -> None:
        super().__init__(job.config)
        self.projections, self.edits = projections, edits or {}
        self.state = job.history[-1].stream_state if job.history else {}

    def loss(self, nll_L: torch.Tensor, rows: LabeledRows) -> torch.Tensor:
        return nll_L.mean()  # over all target tokens of the batch

    def optimizer(self, copies: Sequence[WeightCopies | BlockCopies]) -> torch.optim.Optimizer:
        optimizer = super().optimizer(copies)
        for name, leaf in _leaves(copies):
            if f"{FIRST}/{name}" in self.state:
                first, second = (self.state[f"{part}/{name}"].to(leaf) for part in (FIRST, SECOND))
                if name in self.projections:  # the second moment stays, as released
                    first = self.projections[name](first)
                fused = optimizer.defaults.get("fused")
                optimizer.state[leaf] = {
                    "step": self.state[STEP].to(leaf.device if fused else "cpu", torch.float32).clone(),
                    "exp_avg": first.expand_as(leaf).contiguous(),
                    "exp_avg_sq": second.expand_as(leaf).contiguous(),
                }
        return optimizer

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, copies: Sequence[WeightCopies | BlockCopies]) -> None:
        maps = [(leaf, self.projections[name]) for name, leaf in _leaves(copies) if name in self.projections]
        if self.config.projected == "gradient":
            for leaf, project in maps:
                if leaf.grad is not None:
                    leaf.grad.copy_(project(leaf.grad))
            optimizer.step()
            return
        before = [leaf.clone() for leaf, _ in maps]
        optimizer.step()
        for (leaf, project), start in zip(maps, before, strict=True):
            leaf.copy_(start + project(leaf - start))

    def describe(self, delta: Delta) -> None:
        outside = {}
        for name, update in delta.dense.items():
            if (project := self.projections.get(name)) is not None:
                left = update - project(update)
                outside[name] = float(left.norm() / update.norm().clamp(min=1e-30))
        delta.diagnostics["projections"] = {
            name: {"free_share": project.free_share, "threshold": project.threshold, "outside_share": outside[name]}
            for name, project in self.projections.items()
        }

    def carry(self, delta: Delta, copies: WeightCopies | BlockCopies, optimizer: torch.optim.Optimizer) -> None:
        for name, leaf in _leaves([copies]):
            if state := optimizer.state.get(leaf):
                delta.stream_state |= {
                    f"{FIRST}/{name}": state["exp_avg"][0],
                    f"{SECOND}/{name}": state["exp_avg_sq"][0],
                }
                delta.stream_state[STEP] = state["step"].detach().clone()
            elif f"{FIRST}/{name}" in self.state:  # without a step, below the bound from the start
                delta.stream_state |= {part: self.state[part] for part in (f"{FIRST}/{name}", f"{SECOND}/{name}", STEP)}
        for layer, factors in self.edits.items():
            delta.stream_state |= {
                f"{EDITS}/input/{layer}": factors.input_FF,
                f"{EDITS}/gradient/{layer}": factors.gradient_DD,
                f"{EDITS}/{NUM_TOKENS}/{layer}": torch.tensor(factors.num_tokens),
            }


def _require_moments(last: Delta) -> None:
    """Refuse a step after an edit that was made alone: it keeps no moments, as large as two dense updates."""
    if last.diagnostics.get("steps") and STEP not in last.stream_state:
        raise EditingError(
            "the last edit of the history holds no moments of Adam, with which the next step goes on: it was made "
            "alone. Make the steps of a stream with joint=True, also those of one request."
        )


def _leaves(copies: Sequence[WeightCopies | BlockCopies]) -> list[tuple[str, torch.Tensor]]:
    return [(name, leaf) for group in copies for name, leaf in group.leaves.items()]


def _projections(model: nn.Module, factors: Mapping[int, KFACFactors], energy: float) -> dict[str, CurvatureProjection]:
    """The projection of every trained weight, by parameter."""
    arch = architecture_of(model)
    names = {layer: arch.rewrite_name(layer) for layer in factors}
    return {
        f"{name}.weight": CurvatureProjection(factors[layer], energy, model.get_submodule(name))
        for layer, name in names.items()
    }
