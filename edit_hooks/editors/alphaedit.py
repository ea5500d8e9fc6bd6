"""AlphaEdit: MEMIT restricted to the null space of what is to be preserved.

Method of "AlphaEdit: Null-Space Constrained Knowledge Editing for Language Models". Targets z, keys K and residuals R
as in MEMIT. With C = E[k k^T] of ordinary text and P = U U^T over its eigenvectors with eigenvalues below
``nullspace_threshold``, the released code solves for every layer

    [P (K K^T + S) + L2 I] X = P K R^T,   W <- W + X^T,

S being the sum of K_p K_p^T over the earlier steps of a stream, with keys read after each step's edits (the paper
writes the identity with coefficient 1 instead of L2). By the push-through identity, with K' = [K_p, K], R' = [0, R],

    X^T = R' (K'^T P K' + L2 I)^-1 K'^T P,

so only a system of the size of the keys is solved (float64), the update has rank u, and nothing of size f x f is kept
besides a basis of the null space. The update never leaves that space: X^T P = X^T.

The threshold is absolute on a C normalized per token, so it means something else on every model: the diagnostics give
the null space's share of all directions, rank(P) / f. Near 1 the projection does nothing, near 0 nothing can be
written. Without a threshold the null space is the largest that holds at most ``nullspace_energy`` of trace(C); L2 too
(10, or 1, in the release) is an absolute number beside squared key norms, and without one it is a hundredth of their
mean, trace(C).

The past is whatever ``history`` holds. Released frameworks let S leak from one "independent" edit to the next; to
reproduce that, hand earlier deltas over as history on the untouched model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import CONTRACT_TEXTS
from edit_hooks.editors.memit import MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.editor import VALUE_CONTRACT_SETTINGS
from edit_hooks.locate.null_space import MatrixProjector, null_space_of
from edit_hooks.locate.solve import load_matrices
from edit_hooks.modeling.architectures import input_device
from edit_hooks.utils.errors import EditingError

DEFAULT_L2, RELATIVE_L2 = 10.0, 0.01


@dataclass(kw_only=True)
class AlphaEditConfig(MEMITConfig):
    """MEMIT's settings and those of the projection; ``moment_weight`` has no effect."""

    nullspace_threshold: float | None = config_field(
        "eigenvalues of C below it count as zero; null: by energy", default=None
    )
    nullspace_energy: float = config_field("share of trace(C) in the null space if no threshold is given", default=0.1)
    l2: float | None = config_field("coefficient of the identity; null: a hundredth of trace(C)", default=None)
    projectors: Any = config_field("P per layer instead of second moments: mapping or safetensors file", default=None)
    carry_keys: bool = config_field("in a stream, protect the keys of earlier steps", default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2 is not None and self.l2 <= 0:
            raise EditingError(f"editor setting 'l2' is {self.l2}; a positive number is needed.")
        if not 0 < self.nullspace_energy < 1:
            raise EditingError(f"editor setting 'nullspace_energy' is {self.nullspace_energy}; between 0 and 1.")
        if self.second_moments is None and self.projectors is None:
            raise EditingError(
                "AlphaEdit needs the null space of real keys; second_moments=null (the identity) has none. "
                "Use 'self', a text file, a hub id, or give 'projectors'."
            )


class AlphaEdit(ResidualSpreadingEditor[AlphaEditConfig]):
    """MEMIT's steps with the projector in the place of C^-1 and L2 in the place of lambda."""

    name = "alphaedit"
    config_class = AlphaEditConfig
    config_folders: tuple[str, ...] = ("alphaedit",)
    contract_settings: ClassVar[Mapping[str, Any]] = {
        **VALUE_CONTRACT_SETTINGS,
        "layers": [0, 1],
        "second_moments": CONTRACT_TEXTS,
        "nullspace_energy": 0.9,
        "l2": 0.02,
    }

    def load_constraints(
        self, config: AlphaEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> dict[int, Any]:
        if config.projectors is not None:
            given = load_matrices(config.projectors, config.edited_layers, model, "projectors")
            projectors: dict[int, Any] = {layer: MatrixProjector(matrix) for layer, matrix in given.items()}
        else:
            moments = self.load_moments(config, model, tokenizer)
            device = input_device(model)
            projectors = {
                layer: null_space_of(moment, config.nullspace_threshold, config.nullspace_energy, device)
                for layer, moment in moments.items()
            }
        for layer, projector in projectors.items():
            projector.check(layer)
        return projectors

    def ridge(self, constraint: Any, keys_UF: torch.Tensor, config: AlphaEditConfig) -> float:
        if config.l2 is not None:
            return config.l2
        return DEFAULT_L2 if constraint.trace is None else RELATIVE_L2 * constraint.trace
