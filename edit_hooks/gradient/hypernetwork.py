"""MEND's hyper-network: from the token factors of an edit's gradient to a weight update.

For a linear map y = W x the gradient of a loss is a sum over tokens of outer products, dL/dW = sum_n delta_n x_n^T with
the input x_n [f] and delta_n = dL/dy_n [d]. One network per distinct (d, f) maps (x_n, delta_n) to (x~_n, delta~_n).
Matrices of the same shape share a network and differ by a scale and a shift (their "mode"). The update of matrix l is
-alpha_l sum_n delta~_n x~_n^T with a learned step size alpha_l ("Fast Model Editing at Scale", eq. 3 and 4).

The released code adds this update instead of subtracting it; its training compensates by flipping signs (acknowledged
upstream). ``sign: plus`` reproduces that, for comparison.

A block computes h + max(0, (U V h + b) * scale + shift). U, b and shift are zero at the start, so an untrained network
is the identity. The maximum is a clamp, whose derivative at zero is one: with a relu, training could not leave the
identity. As released, both blocks have the non-linearity.

Shapes: N tokens; f and d, input and output width of a matrix; W = f + d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from edit_hooks.utils.errors import EditingError

EPSILON = 1e-7

Sign = Literal["minus", "plus"]


class TokenFactors(NamedTuple):
    """Gradient of one matrix by tokens: its inputs x [N, f] and the loss gradients delta [N, d] at its outputs."""

    x: torch.Tensor
    delta: torch.Tensor


class Update(NamedTuple):
    """Update ``left @ right.T`` of a matrix: left [d, N], right [f, N]."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class NetworkSettings:
    """Architecture and initialization of a hyper-network.

    Attributes:
        rank: rank of a block's linear map, capped at its width.
        num_blocks: number of blocks.
        normalize: normalize inputs per dimension with the statistics of the training edits.
        step_size: initial step size of every matrix.
        sign: ``minus`` subtracts the update as the paper does; ``plus`` adds it as the release does.
        seed: seed of the random maps V.
    """

    rank: int = 1920
    num_blocks: int = 2
    normalize: bool = True
    step_size: float = 1e-4
    sign: Sign = "minus"
    seed: int = 0


class LowRankBlock(nn.Module):
    """Residual block h -> h + max(0, (U V h + b) * scale_mode + shift_mode)."""

    def __init__(self, width: int, rank: int, num_modes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.zeros(width, rank))
        self.V = nn.Parameter(torch.randn(rank, width, generator=generator, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(num_modes, width))
        self.shift = nn.Parameter(torch.zeros(num_modes, width))

    def forward(self, hidden_NW: torch.Tensor, mode: int) -> torch.Tensor:
        mapped_NW = hidden_NW @ self.V.T @ self.U.T + self.bias
        return hidden_NW + (mapped_NW * self.scale[mode] + self.shift[mode]).clamp(min=0)


class FactorNetwork(nn.Module):
    """The network shared by all matrices R^f -> R^d. Its statistics are buffers, which are saved with it."""

    mean: torch.Tensor
    squares: torch.Tensor
    count: torch.Tensor

    def __init__(self, width_in: int, width_out: int, num_modes: int, settings: NetworkSettings) -> None:
        super().__init__()
        width = width_in + width_out
        generator = torch.Generator().manual_seed(settings.seed)
        rank = min(settings.rank, width)
        self.width_in, self.normalize = width_in, settings.normalize
        self.blocks = nn.ModuleList(LowRankBlock(width, rank, num_modes, generator) for _ in range(settings.num_blocks))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("squares", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def observe(self, tokens: TokenFactors) -> None:
        """Add tokens to the running mean and sum of squared deviations, unless they would not be finite any more.

        Chan's merge of Welford's recurrences; equal to the token-by-token loop of the release.
        """
        new_NW = torch.cat(tokens, 1).to(self.mean)
        if not len(new_NW):
            return
        old_count, new_count = float(self.count), len(new_NW)
        count = old_count + new_count
        mean_W = new_NW.mean(0)
        offset_W = mean_W - self.mean
        # Squares around the two means, plus the term between the means.
        added_W = ((new_NW - mean_W) ** 2).sum(0) + offset_W**2 * (old_count * new_count / count)
        if not torch.isfinite(self.squares + added_W).all():
            return  # one such token would stay in the statistics for ever
        self.count += new_count
        self.mean += offset_W * (new_count / count)
        self.squares += added_W

    def forward(self, tokens: TokenFactors, mode: int) -> TokenFactors:
        hidden_NW = torch.cat(tokens, 1).to(self.mean.dtype)
        if self.normalize:
            # without statistics, tokens that are not finite stay so, and their training step is skipped
            if self.count < 2 and torch.isfinite(hidden_NW).all():
                raise EditingError(
                    "the hyper-network normalizes its input, but its statistics hold fewer than two tokens of training "
                    "edits; train it with lm-edit train mend, or use normalize=false."
                )
            hidden_NW = (hidden_NW - self.mean) / ((self.squares / (self.count - 1)).sqrt() + EPSILON)
        for block in self.blocks:
            hidden_NW = block(hidden_NW, mode)
        return TokenFactors(hidden_NW[:, : self.width_in], hidden_NW[:, self.width_in :])


class HyperNetwork(nn.Module):
    """Networks and step sizes of all edited matrices.

    Args:
        shapes: module name -> (d, f), in the order of the step sizes.
        dtype: of all tensors but the counts.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        settings: NetworkSettings,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shapes, self.settings = dict(shapes), settings
        groups: dict[tuple[int, int], list[str]] = {}
        for name, shape in self.shapes.items():
            groups.setdefault(shape, []).append(name)
        self.modes = {name: group.index(name) for group in groups.values() for name in group}
        self.networks = nn.ModuleDict(
            {
                _network_name(shape): FactorNetwork(shape[1], shape[0], len(group), settings)
                for shape, group in groups.items()
            }
        )
        self.to(dtype)
        self.step_sizes = nn.Parameter(torch.full((len(self.shapes),), settings.step_size, dtype=dtype))

    def observe(self, tokens: Mapping[str, TokenFactors]) -> None:
        """Add an edit's tokens to the statistics of the networks.

        The tokens of all matrices come before any is normalized. The release normalizes each matrix without the later
        ones of the same edit, a difference that vanishes as the count grows.
        """
        for name, factors in tokens.items():
            self._network(name).observe(drop_zero_tokens(factors))

    def forward(self, tokens: Mapping[str, TokenFactors]) -> dict[str, Update]:
        """Updates to add to the weights; the rank of each is its number of tokens."""
        sign = -1.0 if self.settings.sign == "minus" else 1.0
        updates = {}
        for step_size, name in zip(self.step_sizes, self.shapes, strict=True):
            x_NF, delta_ND = self._network(name)(drop_zero_tokens(tokens[name]), self.modes[name])
            updates[name] = Update(sign * step_size * delta_ND.T, x_NF.T)
        return updates

    def network_of(self, shape: tuple[int, int]) -> FactorNetwork:
        """The network of the matrices of a shape (d, f)."""
        network = self.networks[_network_name(shape)]
        assert isinstance(network, FactorNetwork)
        return network

    def _network(self, name: str) -> FactorNetwork:
        return self.network_of(self.shapes[name])


def drop_zero_tokens(tokens: TokenFactors) -> TokenFactors:
    """Drop tokens whose input or gradient is all zero: padding, and positions that the loss does not depend on."""
    nonzero_N = (tokens.x != 0).any(1) & (tokens.delta != 0).any(1)
    return TokenFactors(tokens.x[nonzero_N], tokens.delta[nonzero_N])


def _network_name(shape: tuple[int, int]) -> str:
    return f"{shape[1]}_to_{shape[0]}"
