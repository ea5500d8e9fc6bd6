"""Diagnostics of edits that minimize a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def loss_diagnostics(losses: Sequence[float], num_steps: int, *, stopped_early: bool = False) -> dict[str, Any]:
    """Diagnostics that every gradient editor records.

    Args:
        losses: the loss before the first step, after every step or pass, and at the end.
        num_steps: optimizer steps made.
        stopped_early: the loss fell below the editor's bound before the steps were used up.
    """
    return {
        "initial_nll": losses[0],
        "final_loss": losses[-1],
        "steps": num_steps,
        "stop_reason": "loss" if stopped_early else "steps",
        "losses": [{"loss": loss} for loss in losses],
    }
