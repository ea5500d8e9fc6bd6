"""Leading singular vectors: the fewest that hold a share of a matrix's energy."""

from __future__ import annotations

from typing import Literal

import torch

EnergyOf = Literal["squares", "values"]


@torch.no_grad()
def leading_vectors(
    matrix: torch.Tensor, energy: float, energy_of: EnergyOf = "squares"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k leading left and right singular vectors of a matrix, [rows, k] and [columns, k], float64.

    From the Gram matrix of the smaller side.

    Args:
        energy: k is the least number of triplets with this share of the energy; 0: none.
        energy_of: the energy is the sum of the squares of the singular values, or of the values.
    """
    if matrix.shape[0] > matrix.shape[1]:
        right, left = leading_vectors(matrix.T, energy, energy_of)
        return left, right
    precise = matrix.double()
    squares, vectors = torch.linalg.eigh(precise @ precise.T)  # ascending
    left = vectors.flip(1)[:, : num_leading(squares.flip(0).clamp(min=0).sqrt(), energy, energy_of)]
    right = torch.linalg.qr(precise.T @ left).Q  # the same span as that of the right vectors
    return left, right


def num_leading(values: torch.Tensor, energy: float, energy_of: EnergyOf = "squares") -> int:
    """The least number of singular values that hold a share of the energy.

    Args:
        values: descending.
    """
    total = (values**2 if energy_of == "squares" else values).cumsum(0)
    if energy == 0 or total[-1] == 0:
        return 0
    return int((total < energy * total[-1]).sum()) + 1


def without_directions(vectors_EF: torch.Tensor, basis_FK: torch.Tensor) -> torch.Tensor:
    """Vectors, as rows, without their part in the span of an orthonormal basis."""
    basis_FK = basis_FK.to(vectors_EF)
    return vectors_EF - (vectors_EF @ basis_FK) @ basis_FK.T
