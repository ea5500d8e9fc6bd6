"""Running mean and variance of features, merged batch by batch.

Shapes: T tokens of a batch, f and d input and output width of a map, X = f + d features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from edit_hooks.utils.errors import EditingError

VarianceRule = Literal["released", "pooled"]

STATE_PREFIX = "ultraedit"  # of the statistics in saved edits
FEWEST_TOKENS = 2  # that have a variance


class Features(NamedTuple):
    """Inputs h [T, f] and output gradients g [T, d] of one text at one map, float64."""

    inputs_TF: torch.Tensor
    gradients_TD: torch.Tensor

    @property
    def joined(self) -> torch.Tensor:
        return torch.cat([self.inputs_TF, self.gradients_TD], 1)


@dataclass(frozen=True)
class FeatureStatistics:
    """Running mean and sum of squared deviations, float64.

    Attributes:
        count: tokens seen. mean_X: their mean. squares_X: sum of squared deviations from it.
    """

    count: int
    mean_X: torch.Tensor
    squares_X: torch.Tensor

    @classmethod
    def empty(cls, width: int) -> FeatureStatistics:
        zeros_X = torch.zeros(width, dtype=torch.float64)
        return cls(0, zeros_X, zeros_X)

    def merge(self, features_TX: torch.Tensor, rule: VarianceRule = "pooled") -> FeatureStatistics:
        """The statistics of all earlier tokens and these (Chan's formula).

        Args:
            rule: ``pooled`` adds the squared deviations of these tokens. ``released``, UltraEdit's release, adds
                T / (T - 1) times as much (T times the unbiased variance), so the result depends on how tokens are
                split into calls; a single token, NaN in the release, adds none.
        """
        features_TX = features_TX.double().to(self.mean_X.device)
        new, total = len(features_TX), self.count + len(features_TX)
        if new == 0:
            return self
        mean_X = features_TX.mean(0)
        squares_X = (features_TX - mean_X).square().sum(0)
        if rule == "released" and new > 1:
            squares_X = squares_X * new / (new - 1)
        shift_X = mean_X - self.mean_X
        return FeatureStatistics(
            total,
            self.mean_X + shift_X * new / total,
            self.squares_X + squares_X + shift_X.square() * self.count * new / total,
        )

    def normalize(self, features_TX: torch.Tensor) -> torch.Tensor:
        """(x - mean) / std with the unbiased variance.

        Features that never varied become zero.

        Raises:
            EditingError: fewer than two tokens were seen, so no variance is defined.
        """
        if self.count < FEWEST_TOKENS:
            raise EditingError(
                "UltraEdit normalizes by the variance over target tokens and has seen a single one; use start: "
                "calibrated, or edit several requests at once (edit_batch_size)."
            )
        std_X = (self.squares_X / (self.count - 1)).sqrt().to(features_TX.device)
        centered_TX = features_TX - self.mean_X.to(features_TX.device)
        return torch.where(std_X > 0, centered_TX / std_X, 0.0)


def load_statistics(stream_state: Mapping[str, torch.Tensor]) -> dict[str, FeatureStatistics]:
    """The statistics that a step of a stream has stored, by shape of map.

    Raises:
        EditingError: the step was made by another editor.
    """
    shapes = [key.rpartition("/")[2] for key in stream_state if key.startswith(f"{STATE_PREFIX}/count/")]
    if not shapes:
        raise EditingError("the history's last delta was not made by UltraEdit; a stream has one editor throughout.")
    return {
        shape: FeatureStatistics(
            int(stream_state[f"{STATE_PREFIX}/count/{shape}"]),
            stream_state[f"{STATE_PREFIX}/mean/{shape}"],
            stream_state[f"{STATE_PREFIX}/squares/{shape}"],
        )
        for shape in shapes
    }


def save_statistics(statistics: Mapping[str, FeatureStatistics]) -> dict[str, torch.Tensor]:
    """The tensors that :func:`load_statistics` reads."""
    stream_state = {}
    for shape, numbers in statistics.items():
        stream_state[f"{STATE_PREFIX}/count/{shape}"] = torch.tensor(numbers.count)
        stream_state[f"{STATE_PREFIX}/mean/{shape}"] = numbers.mean_X.cpu()
        stream_state[f"{STATE_PREFIX}/squares/{shape}"] = numbers.squares_X.cpu()
    return stream_state
