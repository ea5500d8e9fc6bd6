"""EMMET: MEMIT with the new keys as equality constraints.

Method of "A Unified Framework for Model Editing".

As MEMIT, usually on one layer, but with equality constraints: of all updates that map the keys exactly, the one of
least change is written:

    C_s = lambda C + nu I,   A = C_s^-1 K (K^T C_s^-1 K + eps I)^-1,   W <- W + R A^T.

With nu = 0 this is MEMIT with lambda' = lambda * eps. Published settings use eps = 0.1 although the method has no such
term. The authors' release adds it for batches only (``ridge_single: false``), which writes a single edit exactly;
EasyEdit always adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.editors.memit import MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.moments.solve import KeyMetric, SecondMoment
from edit_hooks.locate.value_editor import VALUE_CONTRACT_SETTINGS
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class EMMETConfig(MEMITConfig):
    """MEMIT's settings and those of the equality constraint."""

    moment_weight: float | None = config_field("lambda, the weight of C; null: 1", within=POSITIVE, default=None)
    identity_weight: float = config_field(
        "nu, the weight of the identity that is added to C", within=NON_NEGATIVE, default=0.0
    )
    ridge: float = config_field(
        "eps, added to the diagonal of K^T C_s^-1 K; 0 writes exactly", within=NON_NEGATIVE, default=0.1
    )
    ridge_single: bool = config_field(
        "add eps for a single edit too, as EasyEdit does; false: for batches only, as the authors do", default=True
    )


class EMMET(ResidualSpreadingEditor[EMMETConfig]):
    """MEMIT with the new keys as equality constraints."""

    name = "emmet"
    config_class = EMMETConfig
    config_folders = ("emmet",)
    num_default_layers = 1
    contract_settings: ClassVar[Settings] = {**VALUE_CONTRACT_SETTINGS, "moment_weight": 1.0}

    def load_constraints(
        self, config: EMMETConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Mapping[int, KeyMetric]:
        moments = self.load_moments(config, model, tokenizer)
        weight = 1.0 if config.moment_weight is None else config.moment_weight
        return {layer: _weighted(moment, weight, config.identity_weight) for layer, moment in moments.items()}

    def ridge(self, metric: KeyMetric, keys_UF: torch.Tensor, config: EMMETConfig) -> float:
        return config.ridge if len(keys_UF) > 1 or config.ridge_single else 0.0


def _weighted(moment: SecondMoment, weight: float, identity_weight: float) -> SecondMoment:
    """lambda C + nu I; for the identity too, whose scale matters here."""
    if moment.matrix_FF is None:
        return _ScaledIdentity(None, moment.report, scale=weight + identity_weight)
    matrix_FF = weight * moment.matrix_FF.double()
    matrix_FF.diagonal().add_(identity_weight)
    return SecondMoment(matrix_FF, moment.report)


@dataclass
class _ScaledIdentity(SecondMoment):
    """A multiple of the identity."""

    scale: float = 1.0

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        return keys_EF / self.scale

    def root(self, width: int) -> torch.Tensor | None:
        return self.scale**0.5 * torch.eye(width, dtype=torch.float64)
