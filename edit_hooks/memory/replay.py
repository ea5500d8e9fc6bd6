"""Replay of past edits while a side memory is trained (WISE, appendix B.3).

The memory in training must be chosen for its own edits and not for merged ones. So after the first merge every training
step adds two margins on the rows of past edits: the distance of one edit of every merged group is pushed below
``ALPHA``, that of one edit since the last merge, the present one included, above ``BETA``.

The edits of a group take turns, from step to step and from edit to edit; the edit since the last merge is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Bounds of the release, whatever the margins of the edit itself are.
ALPHA, BETA = 5.0, 20.0

PAD = -1


@dataclass
class PastEdits:
    """The rows of a stream's edits.

    Attributes:
        rows: per edit, the token ids of its rows without the unrelated one, [R, T], padded with :data:`PAD`; empty
            without replay.
        turns: per merged group, the number of replays so far.
    """

    rows: list[torch.Tensor]
    turns: list[int]

    def add(self, rows: list[list[int]]) -> None:
        """Add an edit."""
        width = max(len(ids) for ids in rows)
        self.rows.append(torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in rows], dtype=torch.int32))


@dataclass
class Replay:
    """The margins on past edits during one edit.

    Attributes:
        past: updated: every call counts a turn.
        group_size: number of edits in a merged group.
        distance: distances [R] of the rows of a past edit, by its number, under a change of the weight.
        draws: chooses among the edits since the last merge.
    """

    past: PastEdits
    group_size: int
    distance: Callable[[int, torch.Tensor], torch.Tensor]
    draws: random.Random

    def loss(self, change: torch.Tensor) -> torch.Tensor:
        """Both margins under a change; zero before the first merge."""
        turns, size = self.past.turns, self.group_size
        if not turns:
            return change.new_zeros(())
        merged = []
        for group, turn in enumerate(turns):
            distance_R = self.distance(group * size + turn % size, change)
            merged.append(mean_positive(distance_R - ALPHA))
            turns[group] += 1
        drawn = self.draws.choice(range(len(turns) * size, len(self.past.rows)))
        recent = mean_positive(BETA - self.distance(drawn, change))
        return torch.stack(merged).mean() + recent


def mean_positive(values: torch.Tensor) -> torch.Tensor:
    """Mean of the positive entries; 0 if there are none."""
    positive = values > 0
    return (values * positive).sum() / positive.sum().clamp(min=1)
