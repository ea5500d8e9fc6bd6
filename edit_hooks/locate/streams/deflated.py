"""A projector that loses the directions of the edits made so far, so that later updates leave their keys alone.

EvoEdit (2510.13851), by its formulas: after a step with keys K (f x u) under the projector P,

    P <- P - Q Q^T,   Q the left singular vectors of P K whose singular values exceed tau ||K||_F.

A later update D = D P gives D k = 0 for every key k whose directions left. Its rank falls by up to u per step: f minus
the rank of all keys is the end. A fact whose key lies among earlier ones cannot be written, so a correction of a fact
has no effect. This is the limit of AlphaEdit's history for L2 -> 0, and not one joint edit of all facts.

Shapes: E keys, Q directions that left, f key width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.moments.solve import KeyMetric


def directions_name(layer: int) -> str:
    """Name of the directions of a layer in ``Delta.stream_state``."""
    return f"deflated.layer{layer}"


@dataclass
class DeflatedProjector:
    """A projector without some directions of its range.

    A :class:`~edit_hooks.locate.moments.solve.KeyMetric`.

    Attributes:
        projector: P_0. directions_FQ: orthonormal columns in its range, float64.
    """

    projector: KeyMetric
    directions_FQ: torch.Tensor

    @classmethod
    def after(cls, history: Sequence[Delta], layer: int, width: int, projector: KeyMetric) -> DeflatedProjector:
        """The projector after some steps of a stream."""
        name = directions_name(layer)
        parts = [delta.stream_state[name] for delta in history if name in delta.stream_state]
        return cls(projector, torch.cat(parts, 1) if parts else torch.zeros(width, 0, dtype=torch.float64))

    @property
    def warnings(self) -> list[str]:
        return list(self.projector.warnings)

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f], in the keys' precision."""
        inside_EF = self.projector.metric_product(keys_EF)
        directions_FQ = self.directions_FQ.to(inside_EF)
        return inside_EF - (inside_EF @ directions_FQ) @ directions_FQ.T

    def coordinates(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f]."""
        return self.metric_product(keys_EF)

    def root(self, width: int) -> torch.Tensor | None:
        """The identity, as for P_0; ``None`` if that has none."""
        return self.projector.root(width)

    def describe(self) -> dict[str, Any]:
        """The constraint as it appears in results (JSON-able)."""
        return {**self.projector.describe(), "num_deflated": self.directions_FQ.shape[1]}

    def new_directions(self, keys_UF: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Orthonormal directions [f, q] that the keys of a step take out of the range, float64.

        Args:
            tolerance: tau, in units of ||K||_F.
        """
        left_FU, values_U, _ = torch.linalg.svd(self.metric_product(keys_UF.double()).T, full_matrices=False)
        return left_FU[:, values_U > tolerance * float(keys_UF.double().norm())]
