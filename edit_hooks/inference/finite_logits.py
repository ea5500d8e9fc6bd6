"""Whether a model's logits are finite while other code generates with it.

This package's decoder sees its own logits (:func:`~edit_hooks.modeling.forward.vocab_loss.greedy_tokens`); ``generate``
of transformers would take a token of NaN for an answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edit_hooks.modeling.hooks import Registration


class LogitsBrokenError(ArithmeticError):
    """A pass had logits that are not finite."""


class LogitWatch:
    """Watches the logits of the last position in every pass of a causal model.

    A row is broken if its largest logit is NaN or infinite; single tokens may have the probability 0 (-inf).

    Args:
        model: the unwrapped model.
        ends_pass: raise LogitsBrokenError in the first pass with a broken row.
    """

    def __init__(self, model: nn.Module, *, ends_pass: bool = False) -> None:
        self._is_broken: torch.Tensor | None = None  # on the device: read once, not at every step

        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            is_broken = ~output.logits[:, -1].amax(-1).isfinite().all()
            if ends_pass and is_broken:
                raise LogitsBrokenError
            self._is_broken = is_broken if self._is_broken is None else self._is_broken | is_broken

        self.registration = Registration(model, hook)

    @property
    def is_finite(self) -> bool:
        """Whether all rows of all passes so far had finite logits; waits for the device."""
        return self._is_broken is None or not bool(self._is_broken)
