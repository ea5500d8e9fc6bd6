"""MLP outputs whose norm is nearest to a wanted contribution.

Some blocks (Gemma 2 and 3, OLMo 2) add n(m) = g * m / rms(m) to the residual stream instead of the MLP output m, so a
residual cannot be added to m directly. For a wanted contribution t the nearest reachable one is

    y = argmin ||g * y - t||^2  subject to  ||y||^2 = d,

and the MLP output rms(m) y produces it; keeping the length of m keeps the weight of other keys in the edited map. One
number per edit is found by bisection. Derivation: docs/explain/design/post-norm.md.

Shapes: E edits, d residual width.
"""

from __future__ import annotations

import torch
from torch import nn

BISECTIONS = 100


def gains(norm: nn.Module, width: int) -> torch.Tensor:
    """Gains g of an RMS norm, float64 [d].

    Read off its output for the all-ones vector, because families store the gains in different ways.
    """
    parameter = next(norm.parameters())
    ones_D = torch.ones(width, device=parameter.device, dtype=torch.promote_types(parameter.dtype, torch.float32))
    return norm(ones_D).detach().double()


def nearest_outputs(norm: nn.Module, outputs_ED: torch.Tensor, shares_ED: torch.Tensor) -> torch.Tensor:
    """MLP outputs for which the block adds about n(m) + share, float64 [E, d].

    Args:
        norm: the block's RMS norm over MLP outputs.
        outputs_ED: current MLP outputs m.
        shares_ED: wanted change of the block's contribution to the residual stream.
    """
    outputs_ED, shares_ED = outputs_ED.double(), shares_ED.double()
    gain_D = gains(norm, outputs_ED.shape[1]).to(outputs_ED.device)
    rms_E1 = outputs_ED.square().mean(1, keepdim=True).sqrt()
    wanted_ED = gain_D * outputs_ED / rms_E1 + shares_ED
    return rms_E1 * nearest_on_ellipsoid(gain_D, wanted_ED)


def nearest_on_ellipsoid(gain_D: torch.Tensor, wanted_ED: torch.Tensor) -> torch.Tensor:
    """argmin ||g * y - t|| over ||y||^2 = d for every row t, float64 [E, d]."""
    width = len(gain_D)
    product_ED = gain_D * wanted_ED
    square_D = gain_D.square()
    smallest = square_D.min()
    # ||y||^2 falls monotonically in the multiplier. At the lower bound the coordinate of smallest gain alone has length
    # sqrt(d) or more; at the upper bound all coordinates together have less.
    touching_E = product_ED[:, square_D.argmin()].abs() / width**0.5
    low_E = touching_E - smallest
    high_E = torch.maximum(product_ED.norm(dim=1) / width**0.5, low_E)
    for _ in range(BISECTIONS):
        middle_E = (low_E + high_E) / 2
        too_long_E = _stationary_point(product_ED, square_D, middle_E).square().sum(1) > width
        low_E = torch.where(too_long_E, middle_E, low_E)
        high_E = torch.where(too_long_E, high_E, middle_E)
    return _stationary_point(product_ED, square_D, high_E)


def _stationary_point(product_ED: torch.Tensor, square_D: torch.Tensor, multiplier_E: torch.Tensor) -> torch.Tensor:
    """y = g t / (g^2 + mu) for a Lagrange multiplier mu per edit."""
    denominator_ED = (square_D + multiplier_E[:, None]).clamp(min=torch.finfo(torch.float64).tiny)
    return product_ED / denominator_ED
