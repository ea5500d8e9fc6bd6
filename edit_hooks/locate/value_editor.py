"""Base class of editors that optimize the value of a fact at one site."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_given_tensors
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import (
    ROW_TOKENS,
    SUFFIX_TOKENS,
    TARGET_TOKENS,
    Footprint,
    kept_activations,
    low_rank_bytes,
    passes,
)
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.context_templates import (
    BARE,
    BARE_SET,
    check_templates,
    num_templates,
    resolved_templates,
    warn_of_english,
)
from edit_hooks.locate.values.evk_align import EVKAlignConfig, evk_term, log_noise
from edit_hooks.locate.values.rows import FactToken, kl_row, rewriting_row
from edit_hooks.locate.values.value_batch import MakeForward, Site, ValueProblem
from edit_hooks.locate.values.value_optimization import ENGINES
from edit_hooks.locate.values.value_steps import OptimizedValue, Term, TermMaker, ValueSettings
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import UnusableRequestError, refuse
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

UNLIKELY_NLL = 1.0


UNLIKELY_TARGET_WARNING = (
    f"the value optimization ended with more than {UNLIKELY_NLL:g} nat per target token, so the edit may not take. "
    "Try more num_steps, another lr, a larger clamp_factor or another layer; lm-edit tune searches over them."
)


# Keys at the first position are nearly alike for all tokens and many times larger than elsewhere (an attention sink):
# on SmolLM2 135M, layer 9, norms of 57 to 107 there and of 4 to 8 at later tokens. An update for one moves all prompts.
# A start token put before the prompt is not always a way out: behind SmolLM2's <|im_start|> the key has norm 90.
STAND_IN_WARNING = (
    "the fact token is the first token of the prompt, because the subject begins it and the tokenizer adds no start "
    "token. All prompts share the key of that position, so the edit is made behind the context templates only: it "
    "shows where text precedes the subject, not in the bare prompt. Put words before the subject if the bare prompt "
    "counts."
)
FIRST_POSITION_WARNING = (
    "first_position=released: a key is read at the first token of the sequence, which all prompts share; such an edit "
    "can wreck the model. The default, stand_in, reads it behind the context templates only."
)


# Contract settings of editors that optimize a value; they converge quickly on models of a few thousand weights.
VALUE_CONTRACT_SETTINGS: Settings = {
    "layers": [1],
    "num_steps": 6,
    "lr": 0.1,
    "weight_decay": 1e-3,
    "clamp_factor": 4.0,
    "kl_factor": 0.0625,
    "second_moments": None,
    "context_templates": ["{}", "The band released. {}", "Therefore the train. {}", "You can see. {}"],
    "early_stop_loss": 0.05,
    "fact_token": "subject_last",
}
# Two layers, so that the second is solved with the update of the first; the constraint weighs about as much as a key.
MEMIT_CONTRACT_SETTINGS: Settings = {**VALUE_CONTRACT_SETTINGS, "layers": [0, 1], "moment_weight": 1.0}


CONTEXT_TEMPLATES_HELP = (
    "texts with {} for the prompt, over which keys are averaged: a list, or the name of a set that the model samples"
)


@dataclass(kw_only=True)
class ValueEditConfig(EVKAlignConfig, EditorConfig):
    """Settings of editors that optimize the value of a fact."""

    num_steps: int = config_field(
        "loss evaluations of the value optimization; one update fewer is made", within=POSITIVE, default=20
    )
    lr: float = config_field("Adam learning rate of the offset", within=POSITIVE, default=0.5)
    weight_decay: float = config_field(
        "factor of the penalty ||delta|| / ||v0||^2 on the offset", within=NON_NEGATIVE, default=0.5
    )
    clamp_factor: float = config_field("radius of the offset's ball in units of ||v0||", within=POSITIVE, default=4.0)
    kl_factor: float = config_field(
        "factor of the KL term that keeps the prediction after the subject", within=NON_NEGATIVE, default=0.0625
    )
    early_stop_loss: float = config_field("stop when the total loss falls below this", default=0.05)
    fact_token: FactToken = config_field("position at which keys are read and values written", default="subject_last")
    append_eos: bool = config_field("append the end-of-text token to the target of the optimization", default=False)
    context_templates: list[str] | str = config_field(CONTEXT_TEMPLATES_HELP, default="sampled_21")
    first_position: Literal["stand_in", "released"] = config_field(
        "prompts whose fact token is the first token of the sequence; stand_in: the first template with text before "
        "the prompt replaces the bare one, and an edit without such a template is refused; released: the "
        "bare prompt is used all the same",
        default="stand_in",
    )
    keep_intermediates: bool = config_field(
        "keep keys, values and residuals on the delta for inspection", default=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_evk_settings()
        check_templates(self.context_templates)


@dataclass(kw_only=True)
class MEMITValueConfig(ValueEditConfig):
    """Settings of the value optimization with MEMIT's defaults."""

    num_steps: int = config_field(
        "loss evaluations of the value optimization; one update fewer is made", within=POSITIVE, default=25
    )
    clamp_factor: float = config_field("radius of the offset's ball in units of ||v0||", within=POSITIVE, default=0.75)
    context_templates: list[str] | str = config_field(CONTEXT_TEMPLATES_HELP, default="sampled_6")


ValueEditConfigT = TypeVar("ValueEditConfigT", bound=ValueEditConfig)


class ValueEditor(Editor[ValueEditConfigT]):
    """Base of editors that optimize the value of a fact.

    Attributes:
        site: module whose output the offset is optimized at, the MLP's or the block's.
    """

    site: Site = "mlp"
    edits_quantized = True
    reads_past_updates = False

    # -- configuration -----------------------------------------------------------------------------------------------

    def default_config(self, model: nn.Module) -> ValueEditConfigT:
        config = super().default_config(model)
        if config.evk_noise is not None:
            config.evk_noise = read_given_tensors(config.evk_noise, "evk_noise")
        return config

    def fill_sampled_settings(
        self, config: ValueEditConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> ValueEditConfigT:
        texts = resolved_templates(config.context_templates, model, tokenizer, config.seed)
        return dataclasses.replace(config, context_templates=texts)

    def known_contexts(self, model: PreTrainedModel | None = None) -> Sequence[str]:
        resolved = None if model is None else self._resolved.get(model)
        config = resolved or self.config_class.from_mapping(self.overrides)
        return () if isinstance(config.context_templates, str) else config.context_templates

    def target_layer(self, config: ValueEditConfigT) -> int:
        """Hook: the layer at which targets are optimized; the last edited one by default."""
        return config.edited_layers[-1]

    def footprint(self, config: ValueEditConfigT, model: nn.Module) -> Footprint:
        names, last = self.target_modules(config, model), self.target_layer(config)
        rows = num_templates(config.context_templates) + 1  # and the KL row
        above = min(last + 1, num_layers(model) - 1)
        reading = passes(model, first=0, rows=rows, tokens=ROW_TOKENS, steps=len(config.edited_layers), backward=False)
        optimizing = passes(
            model, first=above, rows=rows, tokens=SUFFIX_TOKENS, steps=config.num_steps, labels=TARGET_TOKENS
        )
        return Footprint(
            activations=kept_activations(model, first=above, rows=rows, tokens=SUFFIX_TOKENS, labels=TARGET_TOKENS),
            update=low_rank_bytes(model, names, 1),
            work=reading + optimizing,
        )

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        config = self.known_config(model)
        if isinstance(config.context_templates, list):
            templates_of(tokenizer, request, config)
        elif config.context_templates == BARE_SET:
            templates_of(tokenizer, request, dataclasses.replace(config, context_templates=[BARE]))

    # -- editing -----------------------------------------------------------------------------------------------------

    def warnings(self, job: EditJob[ValueEditConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        fact_token = job.config.fact_token
        warn_of_english(job.config.context_templates, requests, self.name)
        warnings = []
        if any(rewriting_row(job.tokenizer, request, BARE, fact_token).position == 0 for request in requests):
            is_released = job.config.first_position == "released"
            warnings.append(FIRST_POSITION_WARNING if is_released else STAND_IN_WARNING)
        if delta.diagnostics.get("final_nll", 0.0) > UNLIKELY_NLL:
            warnings.append(UNLIKELY_TARGET_WARNING)
        return warnings

    def problems(self, job: EditJob[ValueEditConfigT]) -> list[ValueProblem]:
        """Per request its rewriting rows and its KL row.

        One rewriting row per context template, the bare prompt or its stand-in first.
        """
        config, tokenizer = job.config, job.tokenizer
        return [
            (
                [
                    rewriting_row(tokenizer, request, template, config.fact_token, append_eos=config.append_eos)
                    for template in templates_of(tokenizer, request, config)
                ],
                kl_row(tokenizer, request, config.fact_token),
            )
            for request in job.requests
        ]

    def terms(self, job: EditJob[ValueEditConfigT], make_forward: MakeForward) -> TermMaker | None:
        """Hook: additional terms of the value optimization.

        By default EVK-Align's, if ``evk_align`` is set.

        Args:
            make_forward: makes forward passes of a batch under offsets at this editor's layer and site.
        """
        config = job.config
        if not config.evk_align:
            return None
        log_noise(job.model, config)
        templates = [templates_of(job.tokenizer, request, config) for request in job.requests]

        def make_term(chunk: Sequence[int]) -> list[Term]:
            requests, first = [job.requests[index] for index in chunk], [templates[index][0] for index in chunk]
            return [evk_term(job.model, job.tokenizer, requests, first, config, make_forward)]

        return make_term


def templates_of(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: ValueEditConfig) -> Sequence[str]:
    """The context templates that a request is read in, as many as configured.

    A template that puts the fact token at the first position is replaced by the first one that does not.

    Raises:
        UnusableRequestError: there is none.
    """
    templates: Sequence[str] = config.context_templates
    if config.first_position == "released":
        return templates

    def position(template: str) -> int:
        return rewriting_row(tokenizer, request, template, config.fact_token).position

    if position(BARE) > 0:
        return templates
    stand_in = next((template for template in templates if position(template) > 0), None)
    if stand_in is None:
        raise UnusableRequestError(
            f"{request.label}: the fact token of {request.text!r} is the first token of the sequence, whose key "
            "all prompts share, so an edit there wrecks the model. Put words before the subject, or give context "
            "templates with text (context_templates=sampled_21). first_position=released edits there all the same."
        )
    return [template if position(template) > 0 else stand_in for template in templates]


def forward_maker(model: PreTrainedModel, config: EditorConfig, layer: int, site: Site) -> MakeForward:
    """Make forward passes of the configured engine with offsets at one layer and site."""
    return lambda batch: ENGINES[config.engine](model, batch, layer, site)


def check_reach(job: EditJob[ValueEditConfigT], problems: Sequence[ValueProblem], layer: int) -> None:
    """Check that the offset of every edit can reach a target token.

    An offset in the last block acts at its own position only, because no attention follows. If no target token is
    predicted at the fact token, the gradient is zero and nothing is learned.

    Raises:
        UnusableRequestError: edits cannot reach their targets; it names all of them.
    """
    if layer != num_layers(job.model) - 1:
        return
    unreachable = {
        request.key: (
            f"{request.label}: block {layer} is the last one, so an edit at the fact token of "
            f"{request.text!r} cannot reach the target after it. Choose an earlier block with 'layers', or "
            "fact_token=last."
        )
        for request, (rows, _) in zip(job.requests, problems, strict=True)
        if not any(position == row.position for row in rows for position, _ in row.labels)
    }
    refuse(unreachable)


def value_settings(config: ValueEditConfig, layer: int, site: Site) -> ValueSettings:
    """Settings of the value optimization at one layer."""
    return ValueSettings(
        layer=layer,
        site=site,
        num_steps=config.num_steps,
        lr=config.lr,
        weight_decay=config.weight_decay,
        clamp_factor=config.clamp_factor,
        kl_factor=config.kl_factor,
        early_stop_loss=config.early_stop_loss,
    )


def value_diagnostics(value: OptimizedValue) -> dict[str, Any]:
    """Diagnostics of one optimized value, which show why an edit did not take."""
    return {
        "final_loss": value.losses[-1]["loss"],
        "final_nll": value.losses[-1]["nll"],
        "initial_nll": value.losses[0]["nll"],
        "steps": value.num_updates,
        "stop_reason": value.stop_reason,
        "clamped": value.clamped,
        "delta_norm_ratio": float(value.delta_D.norm() / value.v0_D.norm()),
        **value.notes,
    }


def batch_diagnostics(values: Sequence[OptimizedValue]) -> dict[str, Any]:
    """Diagnostics of the value optimizations behind one delta.

    For a joint batch: means over its requests, the extremes that show a failed one, and the mean loss curve.
    """
    records = [value_diagnostics(value) for value in values]
    if len(values) == 1:
        return {**records[0], "losses": values[0].losses}

    def mean(name: str) -> float:
        return sum(record[name] for record in records) / len(records)

    steps = max(len(value.losses) for value in values)
    curves = [[record["loss"] for record in value.losses] for value in values]
    padded = [curve + [curve[-1]] * (steps - len(curve)) for curve in curves]  # a stopped request keeps its loss
    losses = [{"loss": sum(column) / len(column)} for column in zip(*padded, strict=True)]
    return {
        "num_requests": len(records),
        "final_loss": losses[-1]["loss"],
        "final_loss_worst": max(record["final_loss"] for record in records),
        **{name: mean(name) for name in ("final_nll", "initial_nll", "delta_norm_ratio", *values[0].notes)},
        "steps": max(record["steps"] for record in records),
        "stop_reason": "loss" if all(record["stop_reason"] == "loss" for record in records) else "steps",
        "num_clamped": sum(record["clamped"] for record in records),
        "clamped": any(record["clamped"] for record in records),
        "losses": losses,
    }
