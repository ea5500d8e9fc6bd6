"""Training steps that the host launches without a read of their losses, or with late reads for an early stop.

Shapes: R losses of a step, one per row or edit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from edit_hooks.modeling.device.recording import Step, recording_of, records, tensors_in
from edit_hooks.modeling.device.run_ahead import LateRead, runs_ahead

FEWEST_RECORDED = 6  # steps of a training; a recording takes the time of about four
# Attribute of fused optimizers, made for gradients that overflow: where it is 1, the device skips the step.
SKIPPED = "found_inf"


class FixedSteps:
    """Training steps without an early stop: the host reads no loss before the last one.

    With one, the losses of a step are read while the next one runs, and the optimizer skips the steps after the end on
    the device. On a GPU the second step is recorded and replayed (:mod:`edit_hooks.modeling.device.recording`).

    Attributes:
        losses_R: of the last step.
        noise: random numbers that a step reads, which are drawn before it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        kind: str,
        key: Hashable,
        reads: Any,
        noise: Sequence[torch.Tensor] = (),
        after_step: Callable[[], None] = lambda: None,
        stop_below: float | None = None,
    ) -> None:
        """What is trained and how.

        Args:
            evaluate: the loss to be minimized, and the losses [R] to be recorded.
            kind: name of these steps. key: settings that they depend on.
            reads: the tensors that ``evaluate`` reads, besides the trained ones and the model
                (:func:`~edit_hooks.modeling.device.recording.tensors_in`).
            after_step: changes what is trained, in place; it must change nothing if called again.
            stop_below: no step follows a loss below it; for a single loss and a fused optimizer.
        """
        self.model, self.optimizer, self.evaluate = model, optimizer, evaluate
        self.kind, self.key, self.reads, self.noise = kind, key, reads, list(noise)
        self.leaves: list[torch.Tensor] = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        self.after_step, self.stop_below = after_step, stop_below
        self.losses_R: torch.Tensor | None = None

    def run(self, num_steps: int, draw: Callable[[Sequence[torch.Tensor]], None] | None = None) -> list[torch.Tensor]:
        """Train in place; the losses [R] of every step, still on the device.

        Args:
            draw: fills the noise of a step.
        """
        history, step, trained = [], self._launch, self.leaves
        reads: list[LateRead] = []
        for number in range(num_steps):
            if draw is not None:
                draw(self.noise)
            # A training that is over would record, and try, a step that is skipped.
            if number == 1 and self._is_recorded(num_steps) and (not reads or bool(reads[0].wait())):
                step, trained = self._recorded()
            step()
            assert self.losses_R is not None
            history.append(self.losses_R.clone())
            if self.stop_below is not None:
                reads.append(LateRead(self._goes_on(self.losses_R)))
                if number and not bool(reads[number - 1].wait()):
                    history.pop()  # the step that was launched before the end was known, and skipped
                    break
        if self.stop_below is not None:
            setattr(self.optimizer, SKIPPED, None)
        with torch.no_grad():
            for leaf, own in zip(self.leaves, trained, strict=True):
                if leaf is not own:
                    leaf.copy_(own)
        return history

    def _launch(self) -> None:
        with torch.enable_grad():
            total, losses_R = self.evaluate()
        gradients = torch.autograd.grad(total, self.leaves, allow_unused=True)
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            # Fused optimizers read both as flat memory. `backward` would take care of that, but its nodes that
            # accumulate belong to the stream of the first step, which is not that of a recording.
            is_alike = gradient is None or gradient.stride() == leaf.stride()
            leaf.grad = gradient if is_alike else torch.empty_like(leaf).copy_(gradient)
        if self.stop_below is not None:
            setattr(self.optimizer, SKIPPED, (~self._goes_on(losses_R.detach())).float())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()
        if self.losses_R is None:
            self.losses_R = losses_R.detach().clone()
        else:
            self.losses_R.copy_(losses_R.detach())

    def _goes_on(self, losses_R: torch.Tensor) -> torch.Tensor:
        """Whether a step follows these losses; NaN ends the training."""
        assert self.stop_below is not None
        return (losses_R >= self.stop_below).any()

    def _is_recorded(self, num_steps: int) -> bool:
        device = self.leaves[0].device
        return num_steps > FEWEST_RECORDED and runs_ahead(device) and records(self.model, device, self.kind)

    def _recorded(self) -> tuple[Step, list[torch.Tensor]]:
        """What runs a step from now on, and the leaves that it trains."""
        assert self.losses_R is not None
        states = [list(self.optimizer.state[leaf].values()) for leaf in self.leaves]
        results = [*self.leaves, self.losses_R]
        tensors = tensors_in([results, self.noise, states, self.reads])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of steps that could be recorded and are not
            self._make_recordable(True)
            recording = recording_of(self.model, self.kind, self.key, self._launch, tensors, results)
        if recording is None:
            self._make_recordable(False)
            return self._launch, self.leaves
        start, end = len(results), len(results) + len(self.noise)
        self.losses_R, self.noise = recording.tensors[start - 1], recording.tensors[start:end]
        return recording.replay, recording.tensors[: start - 1]

    def _make_recordable(self, wanted: bool) -> None:
        for group in self.optimizer.param_groups:
            group["capturable"] = wanted and self.leaves[0].is_cuda
