"""Writing through a norm: which MLP output makes a normalized block add what is wanted.

Some blocks add n(m) = g * m / rms(m) to the residual stream instead of the MLP output m (Gemma 2 and 3, OLMo 2). What
such a block can add are the points g * y with rms(y) = 1, an ellipsoid around the origin: the length of m does not
matter, only its direction does. A residual spread as if m itself were added overshoots, because the norm divides the
change by rms(m); the update then grows from layer to layer until it is many times the weight.

So for a wanted contribution t (what is added now plus this layer's share of the residual) take the reachable point
nearest to it,

    y = argmin ||g * y - t||^2  subject to  ||y||^2 = d,

and the MLP output m' = rms(m) y that gives it; the length of m is kept, so that other keys' shares of the edited map
keep their weight against it. The stationary points are y = g t / (g^2 + mu), and the minimum is the one with
mu > -min g^2, where sum (g t)^2 / (g^2 + mu)^2 falls monotonically from infinity to 0: one number per edit, found by
bisection. Unlike a step along the (pseudo-)inverse Jacobian of the norm this is exact for residuals of any size, needs
no damping, and does not blow up along coordinates whose gain is small.
"""

from __future__ import annotations

import torch
from torch import nn

BISECTIONS = 100


def gains(norm: nn.Module, width: int) -> torch.Tensor:
    """g of an RMS norm, float64 [d]: its answer to the all-ones vector, whatever the family stores."""
    parameter = next(norm.parameters())
    ones_D = torch.ones(width, device=parameter.device, dtype=torch.promote_types(parameter.dtype, torch.float32))
    return norm(ones_D).detach().double()


def nearest_outputs(norm: nn.Module, outputs_ED: torch.Tensor, shares_ED: torch.Tensor) -> torch.Tensor:
    """MLP outputs [E, d] for which the block adds as nearly as possible n(m) + share.

    Args:
        norm: the block's RMS norm over MLP outputs.
        outputs_ED: current MLP outputs m.
        shares_ED: wanted change of what the block adds to the residual stream.
    """
    outputs_ED, shares_ED = outputs_ED.double(), shares_ED.double()
    gain_D = gains(norm, outputs_ED.shape[1]).to(outputs_ED.device)
    rms_E1 = outputs_ED.square().mean(1, keepdim=True).sqrt()
    wanted_ED = gain_D * outputs_ED / rms_E1 + shares_ED
    return rms_E1 * nearest_on_ellipsoid(gain_D, wanted_ED)


def nearest_on_ellipsoid(gain_D: torch.Tensor, wanted_ED: torch.Tensor) -> torch.Tensor:
    """argmin ||g * y - t|| over ||y||^2 = d for every row t of ``wanted_ED``; float64."""
    width = len(gain_D)
    product_ED = gain_D * wanted_ED
    square_D = gain_D.square()
    smallest = square_D.min()
    # At the lower end the smallest-gain coordinate alone has length sqrt(d) or more, at the upper end all have less.
    touching_E = product_ED[:, square_D.argmin()].abs() / width**0.5
    low_E = touching_E - smallest
    high_E = torch.maximum(product_ED.norm(dim=1) / width**0.5, low_E)
    for _ in range(BISECTIONS):
        middle_E = (low_E + high_E) / 2
        too_long_E = _point(product_ED, square_D, middle_E).square().sum(1) > width
        low_E = torch.where(too_long_E, middle_E, low_E)
        high_E = torch.where(too_long_E, high_E, middle_E)
    return _point(product_ED, square_D, high_E)


def _point(product_ED: torch.Tensor, square_D: torch.Tensor, shift_E: torch.Tensor) -> torch.Tensor:
    denominator_ED = (square_D + shift_E[:, None]).clamp(min=torch.finfo(torch.float64).tiny)
    return product_ED / denominator_ED
