"""NAS: AlphaEdit with target values of the norm that edits of the unedited model have.

Method of the NAS release (2602.02543). In a stream the values that are optimized on edited weights grow. Here the value
that the MLP of the last edited layer would give, v = v0 + delta with its output v0 at the bare prompt, is rescaled to a
norm N, and z moves by the difference:

    ||v|| > 2 N: the edit is dropped, z = h^L;   else v <- v N / (||v|| + 1e-10)

N (``anchor``) is a number of the model, the layer and the settings: the mean of ||v|| over many facts, each optimized
alone on the unedited weights and the bare prompt, without the twentieth with the largest norms
(:meth:`NAS.measure_anchor`; the release takes 1,000 of MultiCounterFact). Without an ``anchor`` it is that mean over
the requests of a stream's first step, this package's own rule; a lone first edit is then AlphaEdit's.

The whole value is rescaled, not the offset, so an offset of zero still changes the norm of the output to N. Where the
block normalizes its MLP output (Gemma, OLMo 2), v is the output before that norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.alphaedit import AlphaEdit, AlphaEditConfig
from edit_hooks.locate.context_templates import BARE
from edit_hooks.locate.layerwise_update import uses_norm
from edit_hooks.locate.values.key_reader import read_rows
from edit_hooks.locate.values.value_batch import Site, ValueProblem
from edit_hooks.locate.values.value_steps import OptimizedValue
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import POSITIVE

ANCHOR = "nas_anchor"  # in Delta.meta
TRIMMED_SHARE = 0.05
DROPPED_WARNING = (
    "edits were dropped because their values are more than twice as long as the anchor; they change nothing. Set a "
    "larger anchor (measure_anchor), or a smaller clamp_factor."
)


@dataclass(kw_only=True)
class NASConfig(AlphaEditConfig):
    """AlphaEdit's settings and the norm of target values."""

    anchor: float | None = config_field(
        "N, the norm of a target value at the last edited layer's MLP output; null: the mean over the requests of the "
        "first step",
        within=POSITIVE,
        default=None,
    )


class NAS(AlphaEdit):
    """AlphaEdit whose target values have the norm of the unedited model's."""

    name = "nas"
    config_class = NASConfig
    config_folders = ("alphaedit",)
    stream_growth = StreamGrowth("as alphaedit", "up to f/2 edits")
    writes_states = False
    contract_settings: ClassVar[Settings] = {**AlphaEdit.contract_settings, "anchor": 16.0}

    def compute(self, job: EditJob[AlphaEditConfig]) -> list[Delta]:
        deltas = super().compute(job)
        for delta in deltas:
            delta.meta[ANCHOR] = delta.diagnostics["anchor"]
        return deltas

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        condensed = super().condensed(model, history)
        anchor = _anchor_of(history)
        if anchor is None:
            return condensed
        first, *rest = condensed or [Delta()]
        return [dataclasses.replace(first, meta={**first.meta, ANCHOR: anchor}), *rest]

    def warnings(self, job: EditJob[AlphaEditConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        dropped = [DROPPED_WARNING] if delta.diagnostics["dropped"] else []
        return [*super().warnings(job, requests, delta), *dropped]

    def optimize(
        self, job: EditJob[AlphaEditConfig], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        values = super().optimize(job, problems, site)
        starts_ED = self._starts(job, problems, site, values)
        assert isinstance(job.config, NASConfig)
        given = job.config.anchor or _anchor_of(job.history)
        norms = [float((start_D + value.delta_D).norm()) for start_D, value in zip(starts_ED, values, strict=True)]
        groups = [list(range(len(values)))] if job.joint else [[index] for index in range(len(values))]
        anchors = {index: given or trimmed_mean([norms[one] for one in group]) for group in groups for index in group}
        return [
            _rescaled(value, start_D, norms[index], anchors[index])
            for index, (value, start_D) in enumerate(zip(values, starts_ED, strict=True))
        ]

    def measure_anchor(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest]
    ) -> float:
        """The anchor of a model under these settings: the trimmed mean norm of the values of many facts.

        Args:
            model: without edits. requests: facts that will not be evaluated.
        """
        bare = type(self)({**self.overrides, "context_templates": [BARE], "anchor": None})
        deltas = bare.edit(model, tokenizer, requests, measure=False)
        return trimmed_mean([delta.diagnostics["value_norm"] for delta in deltas])

    @torch.no_grad()
    def _starts(
        self,
        job: EditJob[AlphaEditConfig],
        problems: Sequence[ValueProblem],
        site: Site,
        values: Sequence[OptimizedValue],
    ) -> list[torch.Tensor]:
        """v0 of every request: the output of the last layer's MLP at the bare prompt, before a norm behind it."""
        if site == "mlp":
            assert uses_norm(unwrapped(job.model), job.config.residual_mode)
            return [value.v0_D for value in values]
        layer = job.config.edited_layers[-1]
        outputs_ED = read_rows(job.model, [rows[0] for rows, _ in problems], [layer], layer).outputs_RD[layer]
        return [output_D.to(value.delta_D) for output_D, value in zip(outputs_ED, values, strict=True)]


def trimmed_mean(norms: Sequence[float]) -> float:
    """Mean without the twentieth with the largest norms."""
    kept = sorted(norms)[: len(norms) - int(TRIMMED_SHARE * len(norms))]
    return sum(kept) / len(kept)


def _rescaled(value: OptimizedValue, start_D: torch.Tensor, norm: float, anchor: float) -> OptimizedValue:
    """The value with the norm of the anchor, or without an offset."""
    target_D = (start_D + value.delta_D) * (anchor / (norm + 1e-10))
    is_dropped = norm > 2 * anchor
    delta_D = torch.zeros_like(value.delta_D) if is_dropped else target_D - start_D
    notes = {"value_norm": norm, "anchor": anchor, "dropped": float(is_dropped)}
    return dataclasses.replace(value, delta_D=delta_D, notes={**value.notes, **notes})


def _anchor_of(history: Sequence[Delta]) -> float | None:
    return next((float(delta.meta[ANCHOR]) for delta in history if ANCHOR in delta.meta), None)
