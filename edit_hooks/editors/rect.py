"""RECT: keep only the largest relative changes of an update.

Method of "Model Editing Harms General Abilities ...".

Given the finished update D of any editor and the weight W it is added to, keep the entries with the largest

    |D_ij / (W_ij + guard)|

and write nothing elsewhere. Entries are ranked per matrix. The remaining update is neither rescaled nor low-rank, so it
is stored as the base editor's factors and one bit per entry. Public versions differ:

    ==================================  ==========  ====  =====
    version                             base        keep  guard
    ==================================  ==========  ====  =====
    the copy in the AlphaEdit release   MEMIT       0.4   1e-8
    the RECT release                    ROME        0.2   0
    ==================================  ==========  ====  =====

The first is the default; the project page of the RECT release also calls 40 % the better setting. As in both, masking
happens after the base editor has finished all its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.base.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import parameter_name
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.tensors import pack_bits
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE_SHARE


@dataclass(kw_only=True)
class RECTConfig(WrapperConfig):
    """Settings of the sparsification."""

    keep: float = config_field("share of the entries of each matrix that remain", within=POSITIVE_SHARE, default=0.4)
    guard: float = config_field("added to the weight in the denominator", within=NON_NEGATIVE, default=1e-8)


class RECT(PostProcessingEditor[RECTConfig]):
    """A base editor's update, restricted to its largest relative changes."""

    name = "rect"
    config_class = RECTConfig
    # A sparser edit of a matrix as small as the contract's would hardly act.
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "keep": 0.8,
    }

    def compute(self, job: EditJob[RECTConfig]) -> list[Delta]:
        return [_sparsify(job.model, delta, job.config) for delta in self.base_edits(job)]


@torch.no_grad()
def _sparsify(model: PreTrainedModel, delta: Delta, config: RECTConfig) -> Delta:
    """Restrict a finished delta, in place, to its largest relative changes."""
    parameters = dict(model.named_parameters())
    report: dict[str, dict[str, float]] = {}
    for name, update in delta.weights().items():
        mask = largest_changes(update, parameters[parameter_name(name, parameters)], config.keep, config.guard)
        module, _, leaf = name.rpartition(".")
        if name in delta.dense:
            delta.dense[name] = update * mask
        else:
            assert leaf == "weight"
            delta.masks[module] = pack_bits(mask)
        share_of_norm = float((update * mask).norm() / update.norm().clamp(min=1e-30))
        report[name] = {"kept_share": float(mask.float().mean()), "kept_norm_share": share_of_norm}
    delta.diagnostics |= {"rect": report, "update_norm_ratio": largest_norm_ratio(model, delta)}
    return delta


def largest_changes(update: torch.Tensor, weight: torch.Tensor, keep: float, guard: float) -> torch.Tensor:
    """Mask of the entries with the largest |update / (weight + guard)|.

    It begins with the floor((1 - keep) n)-th smallest entry.

    Without a guard, an update of a zero weight counts as infinitely large; a zero update of it counts as zero.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    score = (update.to(dtype) / (weight.detach().to(update.device, dtype) + guard)).abs().nan_to_num(0.0, torch.inf)
    num_zeroed = int((1 - keep) * score.numel())
    if num_zeroed == 0:
        return torch.ones_like(score, dtype=torch.bool)
    return score >= score.flatten().kthvalue(num_zeroed).values
