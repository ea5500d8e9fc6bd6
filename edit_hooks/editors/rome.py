"""ROME: one rank-one update of one MLP output projection ("Locating and Editing Factual Associations in GPT").

Write W for the rewrite module of the edited layer as a map R^f -> R^d, k for its input at the fact token (the key) and
C = E[k k^T] for the keys of ordinary text. The value optimization gives v* = v0 + delta; then (eq. 2 of the paper)

    W <- W + (v - o) u^T / (k . u),   u = C^-1 k_mean / ||C^-1 k_mean||

The released code takes u from the mean key over the context templates, but k and o = W k + b from the bare prompt.
That mixture makes the denominator small or negative for some subjects and then destroys the model; it is kept here
under the published name. The setting ``key_mode`` says which keys are used where (names of the sheet and of
"Understanding the Collapse of LLMs in Model Editing"):

    ==========  ====================  ====================  =====================================
    key_mode    key in u              key in k . u          output o that is subtracted
    ==========  ====================  ====================  =====================================
    mixed       mean over templates   bare prompt           bare prompt (original ROME)
    prefixed    mean over templates   mean over templates   mean over templates (R-ROME, C-ROME)
    prompt      bare prompt           bare prompt           bare prompt ("p-ROME")
    ==========  ====================  ====================  =====================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.locate.editor import (
    VALUE_CONTRACT_SETTINGS,
    LocateThenEditConfig,
    LocateThenEditEditor,
    check_reach,
    forward_maker,
    value_diagnostics,
    value_settings,
)
from edit_hooks.locate.solve import SecondMoment
from edit_hooks.locate.value_optimization import OptimizedValue, optimize_values
from edit_hooks.modeling.architectures import architecture_of, is_transposed, linear_of
from edit_hooks.modeling.tensors import weight_norm
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

KeyMode = Literal["mixed", "prefixed", "prompt"]


SMALL_DIVISOR_RATIO = 0.1


INCONSISTENT_KEYS_WARNING = (
    "the key of the bare prompt is nearly orthogonal to the mean key over the templates, or points away from it: the "
    "denominator of ROME is below a tenth of what consistent keys give, and the update as many times too large. r_rome "
    "(key_mode=prefixed) has no such edits."
)


@dataclass(kw_only=True)
class ROMEConfig(LocateThenEditConfig):
    """Settings of ROME and of its corrected variants."""

    key_mode: KeyMode = config_field("which keys are used where, see the module's table", default="mixed")
    inverse_dtype: Literal["float32", "float64"] = config_field("precision of C^-1 k", default="float64")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and len(self.layers) != 1:
            raise EditingError(f"ROME edits one layer, 'layers' names {self.layers}.")


ROMEConfigT = TypeVar("ROMEConfigT", bound=ROMEConfig)


class RankOneEditor(LocateThenEditEditor[ROMEConfigT]):
    """A value optimized at one layer and written by a rank-one update; base of ROME and its variants."""

    def compute(self, job: EditJob[ROMEConfigT]) -> list[Delta]:
        (layer,) = job.config.edited_layers
        problems = self.problems(job)
        check_reach(job, problems, layer)
        terms = self.terms(job, forward_maker(job.model, job.config, layer, self.site))
        settings = value_settings(job.config, layer, self.site)
        values = optimize_values(job.model, problems, settings, job.config.engine, progress=job.progress, terms=terms)
        return self._write(job.model, values, self.constraints(job.model)[layer], job.config, layer)

    def warnings(self, job: EditJob[ROMEConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        found = super().warnings(job, requests, delta)
        # With consistent keys the divisor is k^T C^-1 k (or its root), never small or negative.
        if job.config.key_mode == "mixed" and delta.diagnostics["divisor_ratio"] < SMALL_DIVISOR_RATIO:
            found.append(INCONSISTENT_KEYS_WARNING)
        return found

    def _write(
        self,
        model: PreTrainedModel,
        values: Sequence[OptimizedValue],
        moment: SecondMoment,
        config: ROMEConfig,
        layer: int,
    ) -> list[Delta]:
        """Rank-one updates from optimized values; one multi-right-hand-side solve with C for all edits."""
        name = architecture_of(model).rewrite_name(layer)
        module = model.get_submodule(name)
        norm = weight_norm(linear_of(module))
        mean_EF = torch.stack([value.keys_NF.mean(0) for value in values])
        bare_EF = torch.stack([value.keys_NF[0] for value in values])
        direction_EF = moment.solve(bare_EF if config.key_mode == "prompt" else mean_EF, config.inverse_dtype)
        direction_EF = direction_EF / direction_EF.norm(dim=1, keepdim=True)
        deltas = []
        for edit, value in enumerate(values):
            prefixed = config.key_mode == "prefixed"
            key_F = mean_EF[edit] if prefixed else bare_EF[edit]
            output_D = value.outputs_ND.mean(0) if prefixed else value.outputs_ND[0]
            target_D = value.v0_D + value.delta_D
            divisor = torch.dot(key_F, direction_EF[edit])
            left_D = (target_D - output_D) / divisor
            delta = Delta(factors={name: Factor(left_D[:, None], direction_EF[edit][:, None], is_transposed(module))})
            delta.diagnostics = {
                **value_diagnostics(value),
                "constraint": moment.kind,
                "divisor": float(divisor),
                "divisor_ratio": float(divisor / torch.dot(mean_EF[edit], direction_EF[edit])),
                "key_cosine": float(nn.functional.cosine_similarity(mean_EF[edit], bare_EF[edit], dim=0)),
                "update_norm_ratio": float(left_D.norm()) / norm,
                "losses": value.losses,
            }
            if config.keep_intermediates:
                delta.intermediates = {
                    "k_star": bare_EF[edit] if config.key_mode == "prompt" else mean_EF[edit],
                    "u": direction_EF[edit],
                    "v": left_D,
                    "cur_input": key_F,
                    "cur_output": output_D,
                    "v_delta": value.delta_D,
                    "v_star": target_D,
                }
            deltas.append(delta)
        return deltas


class ROME(RankOneEditor[ROMEConfig]):
    """Original ROME, inconsistent keys included; see :mod:`edit_hooks.editors.r_rome` for the corrected form."""

    name = "rome"
    config_class = ROMEConfig
    config_folders: tuple[str, ...] = ("rome",)
    contract_settings: ClassVar[Mapping[str, Any]] = VALUE_CONTRACT_SETTINGS
