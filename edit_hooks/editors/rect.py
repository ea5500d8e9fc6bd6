"""RECT: keep only the largest relative changes of an update.

Method of "Model Editing Harms General Abilities ...".

Given the finished update D of any editor and the weight W it is added to, keep the entries with the largest

    |D_ij / (W_ij + guard)|

and write nothing elsewhere. Entries are ranked per matrix. The remaining update is neither rescaled nor low-rank, so it
is stored as the base editor's factors and one bit per entry. Public versions differ:

    ==================================  ==========  ====  =====  ============
    version                             base        keep  guard  at_threshold
    ==================================  ==========  ====  =====  ============
    the copy in the AlphaEdit release   MEMIT       0.4   1e-8   keep
    the RECT release                    ROME        0.2   0      zero
    ==================================  ==========  ====  =====  ============

The first is the default; the project page of the RECT release also calls 40 % the better setting. As in both, masking
happens after the base editor has finished all its layers.

With z = floor((1 - keep) n), the threshold is the z-th smallest score. ``at_threshold: keep`` zeroes the scores below
it, z - 1 entries without ties. ``zero`` zeroes exactly z entries; of several scores equal to the threshold, those that
come first in the stored weight, where the release leaves the choice to the partition algorithm of numpy.

In a stream the released form forgets what the masks left out. With ``aligned`` it is written with the next step
(:mod:`edit_hooks.base.wrapping.error_feedback`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.base.wrapping.error_feedback import (
    Remainder,
    condense_aligned,
    require_exact_base,
    with_raw_updates,
    with_remainder,
)
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import read_parameter
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.tensors import pack_bits
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE_SHARE

STATE_PREFIX = "rect"  # of the raw updates in saved edits


@dataclass(kw_only=True)
class RECTConfig(WrapperConfig):
    """Settings of the sparsification."""

    keep: float = config_field("share of the entries of each matrix that remain", within=POSITIVE_SHARE, default=0.4)
    guard: float = config_field("added to the weight in the denominator", within=NON_NEGATIVE, default=1e-8)
    at_threshold: Literal["keep", "zero"] = config_field(
        "the entry at the threshold; keep: it remains, with its ties; zero: exactly the share 1 - keep is zeroed",
        default="keep",
    )
    aligned: bool = config_field(
        "in a stream, add what the masks of earlier steps left out before masking; needs stream=exact in base_settings",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aligned:
            require_exact_base(self)
        elif self.base_settings.get("stream") == "exact":
            raise EditingError(
                "base_settings have stream: exact, which counts on the whole update being written, and rect writes a "
                "part of it. Set aligned: true, which adds the rest to the next step, or drop stream: exact."
            )


class RECT(PostProcessingEditor[RECTConfig]):
    """A base editor's update, restricted to its largest relative changes."""

    name = "rect"
    config_class = RECTConfig
    stream_growth = StreamGrowth("as its base; with aligned the d f numbers that were left out", "as its base")
    # A sparser edit of a matrix as small as the contract's would hardly act.
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "keep": 0.8,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self.reads_past_updates = self.base.reads_past_updates

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        if not self._resolved[unwrapped(model)].aligned:
            return self.base.condensed(model, history)
        return condense_aligned(self.base, model, history, STATE_PREFIX)

    def most_state_bytes(self, model: nn.Module) -> int | None:
        return None if self._resolved[unwrapped(model)].aligned else super().most_state_bytes(model)

    def compute(self, job: EditJob[RECTConfig]) -> list[Delta]:
        if not job.config.aligned:
            return [_sparsify(job.model, delta, job.config) for delta in self.base_edits(job)]
        remainder = Remainder(STATE_PREFIX).after(job.model, job.history)
        with remainder.added(job.model):
            raws = self.base_edits(job, with_raw_updates(job.history, STATE_PREFIX))
        return [_sparsify(job.model, with_remainder(job.model, raw, remainder), job.config) for raw in raws]


@torch.no_grad()
def _sparsify(model: PreTrainedModel, delta: Delta, config: RECTConfig) -> Delta:
    """Restrict a finished delta, in place, to its largest relative changes."""
    report: dict[str, dict[str, float]] = {}
    for name, update in beside_weights(model, delta).weights().items():
        mask = largest_changes(update, read_parameter(model, name), config)
        module, _, leaf = name.rpartition(".")
        if name in delta.dense:
            delta.dense[name] = (update * mask).to(delta.dense[name].device)
        else:
            assert leaf == "weight"
            delta.masks[module] = pack_bits(mask)
        share_of_norm = float((update * mask).norm() / update.norm().clamp(min=1e-30))
        report[name] = {"kept_share": float(mask.float().mean()), "kept_norm_share": share_of_norm}
    delta.diagnostics |= {"rect": report, "update_norm_ratio": largest_norm_ratio(model, delta)}
    return delta


def largest_changes(update: torch.Tensor, weight: torch.Tensor, config: RECTConfig) -> torch.Tensor:
    """Mask of the entries with the largest |update / (weight + guard)|.

    Without a guard, an update of a zero weight counts as infinitely large, also an update by zero: numpy, which the
    release sorts with, ranks NaN last.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    denominator = weight.detach().to(update.device, dtype) + config.guard
    score = (update.to(dtype) / denominator).abs().nan_to_num(torch.inf, torch.inf)
    # The share as it was written: in floats, (1 - 0.9) * 1000 is below 100.
    num_zeroed = int((1 - Fraction(str(config.keep))) * score.numel())
    if num_zeroed == 0:
        return torch.ones_like(score, dtype=torch.bool)
    threshold = score.flatten().kthvalue(num_zeroed).values
    mask = score >= threshold
    if config.at_threshold == "zero":
        num_below = score.numel() - int(mask.sum())
        ties = (score == threshold).flatten().nonzero()[:, 0]
        mask.view(-1)[ties[: num_zeroed - num_below]] = False
    return mask
