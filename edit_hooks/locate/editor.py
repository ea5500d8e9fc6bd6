"""What the locate-then-edit editors share: settings of the value optimization, templates, rows and second moments."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.context_templates import BARE, check_templates, sample_templates
from edit_hooks.locate.corpora import digest_of
from edit_hooks.locate.evk_align import EVKConfig, evk_term, log_noise_ratio
from edit_hooks.locate.rows import FactToken, kl_row, rewriting_row
from edit_hooks.locate.second_moments import MAX_LENGTH, MomentDtype, MomentSettings, second_moments
from edit_hooks.locate.solve import SecondMoment, load_second_moments
from edit_hooks.locate.value_batch import MakeForward, Site, ValueProblem
from edit_hooks.locate.value_optimization import ENGINES, OptimizedValue, TermMaker, ValueSettings
from edit_hooks.modeling.architectures import num_layers, unwrapped
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

UNLIKELY_NLL = 1.0


UNLIKELY_TARGET = (
    f"the value optimization ended with a target of more than {UNLIKELY_NLL:g} nat per token, so the edit may not "
    "take; more num_steps, another lr, a larger clamp_factor or another layer may help, lm-edit tune searches."
)


FIRST_TOKEN = (
    "the fact token is the first token of the sequence, where keys and norms of many models are unlike those of any "
    "other position: the edit may show in the bare prompt only, or not at all. A tokenizer that adds a start token, or "
    "a prompt with words before the subject, avoids it."
)


@dataclass(kw_only=True)
class LocateThenEditConfig(EVKConfig):
    """Settings of every editor that optimizes a value at one token and writes it in closed form."""

    num_steps: int = config_field("loss evaluations of the value optimization; one update fewer is made", default=20)
    lr: float = config_field("Adam learning rate of the offset", default=0.5)
    weight_decay: float = config_field("factor of ||delta|| / ||v0||^2", default=0.5)
    clamp_factor: float = config_field("radius of the offset's ball in units of ||v0||", default=4.0)
    kl_factor: float = config_field("factor of the KL term at the subject", default=0.0625)
    early_stop_loss: float = config_field("stop when the total loss is below", default=0.05)
    fact_token: FactToken = config_field("token at which keys are read and values written", default="subject_last")
    context_templates: list[str] | str = config_field("name of a template set or a list of texts", default="sampled_21")
    second_moments: Any = config_field(
        "C per layer: null (identity), self, a text file or folder, a hub id, a safetensors file, or a mapping",
        default=None,
    )
    moment_tokens: int | None = config_field(
        "tokens C is collected from; null: four per dimension or all", default=None
    )
    moment_length: int = config_field("tokens of a document that are used for C", default=MAX_LENGTH)
    moment_dtype: MomentDtype = config_field("precision in which C is kept (sums run in float64)", default="float32")
    moment_digest: str | None = config_field("filled in: checksum of the file or folder C comes from", default=None)
    keep_intermediates: bool = config_field("keep keys and values on the delta for inspection", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_templates(self.context_templates)
        for name in ("num_steps", "lr", "clamp_factor"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")


class LocateThenEditEditor(Editor):
    """Base of the locate-then-edit editors.

    Attributes:
        site: where the offset is optimized; the MLP module's output or the block's.
    """

    config_class: ClassVar[type[EditorConfig]] = LocateThenEditConfig
    site: ClassVar[Site] = "mlp"

    def __init__(self, overrides: Any = None) -> None:
        super().__init__(overrides)
        self._constraints: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]] = weakref.WeakKeyDictionary()

    def config_for(self, model: nn.Module) -> EditorConfig:
        config: Any = super().config_for(model)
        if isinstance(config.second_moments, (str, os.PathLike)):
            config.moment_digest = digest_of(config.second_moments)
        return config

    def resolve(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> EditorConfig:
        """The full configuration; second moments are read here too, while the weights are those of the first call."""
        config = super().resolve(model, tokenizer)
        self.constraints(model, tokenizer, config)
        return config

    def constraints(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: Any) -> dict[int, Any]:
        """What keeps other keys' values at every edited layer, once per model object."""
        inner = unwrapped(model)
        if inner not in self._constraints:
            with torch.inference_mode(False), torch.no_grad():
                self._constraints[inner] = self.load_constraints(inner, tokenizer, config)
        return self._constraints[inner]

    def load_constraints(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: Any) -> dict[int, Any]:
        """Hook: the constraint of every edited layer; the second moments themselves unless a method derives others."""
        return self.load_moments(model, tokenizer, config)

    def load_moments(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: Any
    ) -> dict[int, SecondMoment]:
        """Second moments as the configuration asks for them."""
        source = config.second_moments
        is_text = isinstance(source, (list, tuple)) or (
            isinstance(source, (str, os.PathLike)) and Path(source).suffix != ".safetensors"
        )
        if not is_text:
            return load_second_moments(source, config.layers, model)
        settings = MomentSettings(
            source,
            num_tokens=config.moment_tokens,
            max_length=config.moment_length,
            seed=config.seed,
            dtype=config.moment_dtype,
        )
        return second_moments(model, tokenizer, config.layers, settings)

    def complete(self, config: Any, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Any:
        if isinstance(config.context_templates, str):
            texts = sample_templates(model, tokenizer, config.context_templates, config.seed)
            config = dataclasses.replace(config, context_templates=texts)
        return config

    def contexts(self, model: nn.Module) -> Sequence[str]:
        config: Any = self._resolved.get(unwrapped(model)) or self.config_class.from_mapping(self.overrides)
        return () if isinstance(config.context_templates, str) else config.context_templates

    def warnings(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        requests: Sequence[EditRequest],
        delta: Delta,
    ) -> list[str]:
        constraints = self.constraints(model, tokenizer, config)
        found = [
            f"layer {layer}: {text}" for layer, entry in constraints.items() for text in getattr(entry, "warnings", ())
        ]
        if any(rewriting_row(tokenizer, request, BARE, config.fact_token).position == 0 for request in requests):
            found.append(FIRST_TOKEN)
        if delta.diagnostics.get("final_nll", 0.0) > UNLIKELY_NLL:
            found.append(UNLIKELY_TARGET)
        return found

    def problems(
        self, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest], config: Any
    ) -> list[ValueProblem]:
        """Per request its rewriting rows (one per context template, the bare one first) and its KL row."""
        return [
            (
                [
                    rewriting_row(tokenizer, request, template, config.fact_token)
                    for template in config.context_templates
                ],
                kl_row(tokenizer, request, config.fact_token),
            )
            for request in requests
        ]

    def terms(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        config: Any,
        make_forward: MakeForward,
    ) -> TermMaker | None:
        """Hook: further terms of the value optimization of these requests; EVK-Align where it is asked for.

        Args:
            make_forward: forward passes of a batch of rows under offsets at this editor's layer and site.
        """
        if not config.evk_align:
            return None
        inner = unwrapped(model)
        log_noise_ratio(inner, config.evk_sigma)
        return lambda chunk: [evk_term(inner, tokenizer, [requests[i] for i in chunk], config, make_forward)]


def forward_maker(model: nn.Module, config: Any, layer: int, site: Site) -> MakeForward:
    """Forward passes of the configured engine with offsets at one layer and site."""
    return lambda batch: ENGINES[config.engine](unwrapped(model), batch, layer, site)


def check_reach(
    model: nn.Module, problems: Sequence[ValueProblem], requests: Sequence[EditRequest], layer: int
) -> None:
    """Refuse edits whose offset cannot reach any target token.

    What is added in the last block shows at its own position only, because no attention follows: if no token of the
    target is predicted at the fact token, the gradient is zero and nothing would be learnt.

    Raises:
        EditingError: naming the case and the ways out.
    """
    if layer != num_layers(unwrapped(model)) - 1:
        return
    for request, (rows, _) in zip(requests, problems, strict=True):
        if not any(position == row.position for row in rows for position, _ in row.labels):
            raise EditingError(
                f"case {request.case_id}: block {layer} is the last one, so what is written at the fact token of "
                f"{request.text!r} cannot reach the target behind it. Choose an earlier block with 'layers', or "
                "fact_token=last."
            )


def value_settings(config: Any, layer: int, site: Site) -> ValueSettings:
    """The value optimization of a configuration at one layer."""
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
    """What users need to know when an edit did not take."""
    return {
        "final_loss": value.losses[-1]["loss"],
        "final_nll": value.losses[-1]["nll"],
        "initial_nll": value.losses[0]["nll"],
        "steps": value.num_updates,
        "stop_reason": value.stop_reason,
        "clamped": value.clamped,
        "delta_norm_ratio": float(value.delta_D.norm() / value.v0_D.norm()),
    }
