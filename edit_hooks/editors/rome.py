"""ROME: a rank-one update of one MLP output projection.

Method of "Locating and Editing Factual Associations in GPT".

Write W for the rewrite module of the edited layer as a map R^f -> R^d, k for its input at the fact token (the key) and
C = E[k k^T] for the second moment of keys over ordinary text. The value optimization gives v* = v0 + delta. Then (eq. 2
of the paper; the direction is normalized as in the released code, which cancels)

    W <- W + (v* - o) u^T / (k . u),   u = C^-1 k_mean / ||C^-1 k_mean||

The released code takes u from the mean key over the context templates, but k and o = W k + b from the bare prompt. For
some subjects this mixture makes the denominator small or negative, and a single edit destroys the model. The published
name keeps this behavior. ``key_mode`` selects the keys ("Understanding the Collapse of LLMs in Model Editing"):

    ==========  ====================  ====================  =====================================
    key_mode    key in u              key in k . u          output o that is subtracted
    ==========  ====================  ====================  =====================================
    mixed       mean over templates   bare prompt           bare prompt (original ROME)
    prefixed    mean over templates   mean over templates   mean over templates (R-ROME, C-ROME)
    prompt      bare prompt           bare prompt           bare prompt ("p-ROME")
    ==========  ====================  ====================  =====================================

Shapes: E edits, N context templates, f and d input and output width of the rewrite module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import NOTHING_CARRIED
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.locate.editor import LocateThenEditConfig, LocateThenEditEditor
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.locate.value_editor import (
    VALUE_CONTRACT_SETTINGS,
    check_reach,
    forward_maker,
    value_diagnostics,
    value_settings,
)
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.locate.values.value_steps import OptimizedValue
from edit_hooks.modeling.architectures import architecture_of, is_transposed
from edit_hooks.modeling.weights import weight_norm
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

KeyMode = Literal["mixed", "prefixed", "prompt"]


SMALL_DIVISOR_RATIO = 0.1


INCONSISTENT_KEYS_WARNING = (
    "the key of the bare prompt is nearly orthogonal to the mean key over the templates, or points away from it: the "
    "denominator of ROME is below a tenth of its value under consistent keys, so the update is more than ten times too "
    "large or has the wrong sign. r_rome (key_mode=prefixed) avoids this."
)


@dataclass(kw_only=True)
class ROMEConfig(LocateThenEditConfig):
    """Settings of ROME and of its corrected variants."""

    key_mode: KeyMode = config_field(
        "keys of the update; mixed: direction from the mean over templates, denominator from the bare prompt (ROME); "
        "prefixed: the mean in both (R-ROME); prompt: the bare prompt in both",
        default="mixed",
    )
    inverse_dtype: Literal["float32", "float64"] = config_field(
        "precision of C^-1 k; the release uses float32", default="float64"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and len(self.layers) != 1:
            raise EditingError(
                f"'layers' is {self.layers}, but this editor updates the rewrite module of a single layer; name one "
                "layer, or use memit for several."
            )


ROMEConfigT = TypeVar("ROMEConfigT", bound=ROMEConfig)


class EditKeys(NamedTuple):
    """Keys of one edit, as ``key_mode`` selects them.

    Attributes:
        direction_F: the key that C^-1 is applied to.
        key_F: the key in the denominator.
        output_D: the output that is subtracted from v*.
    """

    direction_F: torch.Tensor
    key_F: torch.Tensor
    output_D: torch.Tensor


class RankOneEditor(LocateThenEditEditor[ROMEConfigT]):
    """A value written by a rank-one update of one layer; base of ROME variants."""

    stream_growth = NOTHING_CARRIED

    def compute(self, job: EditJob[ROMEConfigT]) -> list[Delta]:
        (layer,) = job.config.edited_layers
        problems = self.problems(job)
        check_reach(job, problems, layer)
        terms = self.terms(job, forward_maker(job.model, job.config, layer, self.site))
        settings = value_settings(job.config, layer, self.site)
        values = optimize_values(job.model, problems, settings, job.config.engine, progress=job.progress, terms=terms)
        return self._write(job, values, layer)

    def warnings(self, job: EditJob[ROMEConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        warnings = super().warnings(job, requests, delta)
        # With consistent keys the divisor is k^T C^-1 k / ||C^-1 k||, never small or negative.
        if job.config.key_mode == "mixed" and delta.diagnostics["divisor_ratio"] < SMALL_DIVISOR_RATIO:
            warnings.append(INCONSISTENT_KEYS_WARNING)
        return warnings

    def _write(self, job: EditJob[ROMEConfigT], values: Sequence[OptimizedValue], layer: int) -> list[Delta]:
        """Rank-one updates from optimized values; one solve with C serves all edits."""
        config = job.config
        moment = self.constraints(job.model)[layer]
        assert isinstance(moment, SecondMoment)
        keys = [select_keys(value, config.key_mode) for value in values]
        u_EF = moment.solve(torch.stack([edit.direction_F for edit in keys]), config.inverse_dtype)
        u_EF = u_EF / u_EF.norm(dim=1, keepdim=True)
        name = architecture_of(job.model).rewrite_name(layer)
        module = job.model.get_submodule(name)
        norm = weight_norm(module)
        deltas = []
        for value, edit_keys, u_F in zip(values, keys, u_EF, strict=True):
            divisor = torch.dot(edit_keys.key_F, u_F)
            left_D = (value.v0_D + value.delta_D - edit_keys.output_D) / divisor
            delta = Delta(factors={name: Factor(left_D[:, None], u_F[:, None], is_transposed(module))})
            mean_F, bare_F = value.keys_NF.mean(0), value.keys_NF[0]
            delta.diagnostics = {
                **value_diagnostics(value),
                "constraint": moment.kind,
                "divisor": float(divisor),
                "divisor_ratio": float(divisor / torch.dot(mean_F, u_F)),
                "key_cosine": float(nn.functional.cosine_similarity(mean_F, bare_F, dim=0)),
                "update_norm_ratio": float(left_D.norm()) / norm,
                "losses": value.losses,
            }
            if config.keep_intermediates:
                delta.intermediates = _intermediates(value, edit_keys, u_F, left_D)
            deltas.append(delta)
        return deltas


def select_keys(value: OptimizedValue, key_mode: KeyMode) -> EditKeys:
    """Select the keys of one edit: template means, or those of the bare prompt.

    The bare prompt is the first template.
    """
    mean_F, bare_F = value.keys_NF.mean(0), value.keys_NF[0]
    direction_F = bare_F if key_mode == "prompt" else mean_F
    if key_mode == "prefixed":
        return EditKeys(direction_F, mean_F, value.outputs_ND.mean(0))
    return EditKeys(direction_F, bare_F, value.outputs_ND[0])


def _intermediates(
    value: OptimizedValue, keys: EditKeys, u_F: torch.Tensor, left_D: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tensors behind an update, under the names of the released code."""
    return {
        "k_star": keys.direction_F,
        "u": u_F,
        "v": left_D,
        "cur_input": keys.key_F,
        "cur_output": keys.output_D,
        "v_delta": value.delta_D,
        "v_star": value.v0_D + value.delta_D,
    }


class ROME(RankOneEditor[ROMEConfig]):
    """A rank-one update of one layer, with the original's inconsistent keys.

    See :mod:`edit_hooks.editors.r_rome` for the corrected form.
    """

    name = "rome"
    config_class = ROMEConfig
    config_folders: tuple[str, ...] = ("rome",)
    contract_settings: ClassVar[Settings] = VALUE_CONTRACT_SETTINGS
