"""RECT: keep only the largest relative changes of an update ("Model Editing Harms General Abilities ...", RECT).

Given the finished update D of any editor and the weight W it is added to, keep the entries with the largest

    |D_ij / (W_ij + guard)|

and write nothing elsewhere. The ranking is per matrix; what is kept is neither rescaled nor low-rank, so the update is
stored as the base editor's factors and one bit per entry. Public versions differ:

    ==================================  ==========  ====  =====
    version                             base        keep  guard
    ==================================  ==========  ====  =====
    the copy in the AlphaEdit release   MEMIT       0.4   1e-8
    the RECT release                    ROME        0.2   0
    ==================================  ==========  ====  =====

The first is the default; the project page of the second too calls 40 % the better setting. Masking happens after the
base editor is through with all its layers, as in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.base.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import parameter_name
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.tensors import pack_bits
from edit_hooks.utils.errors import EditingError


@dataclass(kw_only=True)
class RECTConfig(WrapperConfig):
    """What is kept."""

    keep: float = config_field("share of the entries of each matrix that are kept", default=0.4)
    guard: float = config_field("added to the weight in the denominator", default=1e-8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 1:
            raise EditingError(f"editor setting 'keep' is {self.keep}; a share above 0 and up to 1 is needed.")


class RECT(PostProcessingEditor[RECTConfig]):
    """Sparsified updates of a base editor."""

    name = "rect"
    config_class = RECTConfig
    # A sparser edit of a matrix this small would hardly act.
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "keep": 0.8,
    }

    def compute(self, job: EditJob[RECTConfig]) -> list[Delta]:
        return [_sparsify(job.model, delta, job.config) for delta in self.base_edits(job)]


@torch.no_grad()
def _sparsify(model: PreTrainedModel, delta: Delta, config: RECTConfig) -> Delta:
    """Restrict a finished delta, in place, to the entries that are kept."""
    parameters = dict(model.named_parameters())
    facts: dict[str, dict[str, float]] = {}
    for name, update in delta.weights().items():
        mask = largest_changes(update, parameters[parameter_name(name, parameters)], config.keep, config.guard)
        module, _, leaf = name.rpartition(".")
        if name in delta.dense:
            delta.dense[name] = update * mask
        else:
            assert leaf == "weight"
            delta.masks[module] = pack_bits(mask)
        share_of_norm = float((update * mask).norm() / update.norm().clamp(min=1e-30))
        facts[name] = {"kept_share": float(mask.float().mean()), "kept_norm_share": share_of_norm}
    delta.diagnostics |= {"rect": facts, "update_norm_ratio": largest_norm_ratio(model, delta)}
    return delta


def largest_changes(update: torch.Tensor, weight: torch.Tensor, keep: float, guard: float) -> torch.Tensor:
    """Mask of the entries with the largest |update / (weight + guard)|: from the floor((1 - keep) n)-th smallest on.

    An update of a zero weight counts as infinitely large if there is no guard, no update at all as zero.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    score = (update.to(wide) / (weight.detach().to(update.device, wide) + guard)).abs().nan_to_num(0.0, torch.inf)
    num_zeroed = int((1 - keep) * score.numel())
    if num_zeroed == 0:
        return torch.ones_like(score, dtype=torch.bool)
    return score >= score.flatten().kthvalue(num_zeroed).values
