"""Value optimization on a device that runs ahead of the host (:mod:`edit_hooks.modeling.device.run_ahead`).

The steps, losses and stop rules of :mod:`edit_hooks.locate.values.value_optimization`, without a read by the host that
the device would have to wait for. The losses of a step are read while the next step runs, so the host notices that an
edit has ended one step late. Its offset is the one of the step at which its loss fell below the bound all the same: the
device masks the updates of edits that have ended. They leave the batch together, as soon as they are a quarter of it.

Shapes: E edits of the batch, d residual width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from edit_hooks.locate.values.value_batch import ValueForward
from edit_hooks.locate.values.value_steps import (
    AdamState,
    GatheredLabels,
    OptimizedValue,
    Term,
    ValueSettings,
    adam_scales,
    initial_values,
    is_clamped,
    value_losses,
)
from edit_hooks.modeling.device.run_ahead import LateRead

LEAVING_SHARE = 0.25  # of a batch; every time that edits leave it, the host waits for the device


def solve_ahead(
    forward: ValueForward,
    settings: ValueSettings,
    max_logits: int,
    terms: Sequence[Term],
    progress: Callable[[int], None],
) -> list[OptimizedValue]:
    """Optimize the offsets of all edits of a batch."""
    return _Batch(forward, settings, max_logits, terms, progress).solve()


class _StepRecord(NamedTuple):
    """What a step returns to the host.

    Attributes:
        step: its number. edits: the edits of the batch at that step. names: of the losses.
        rows: per edit its losses, and 1 where the total without terms is below the bound.
    """

    step: int
    edits: list[int]
    names: tuple[str, ...]
    rows: LateRead


class _Batch:
    """The edits of a batch.

    Attributes:
        edits: their numbers, by position in the batch. running_E: the edits whose loss was never below the bound.
        open: the edits that the host does not know to have ended.
    """

    def __init__(
        self,
        forward: ValueForward,
        settings: ValueSettings,
        max_logits: int,
        terms: Sequence[Term],
        progress: Callable[[int], None],
    ) -> None:
        self.forward, self.settings, self.max_logits = forward, settings, max_logits
        self.terms, self.progress = terms, progress
        self.results = initial_values(forward.activations, forward.batch)
        self.edits = list(range(len(self.results)))
        self.open = set(self.edits)
        self.state = AdamState.start(torch.stack([value.v0_D for value in self.results]))
        self.running_E = torch.ones_like(self.state.edits_E, dtype=torch.bool)
        self.mean = GatheredLabels.of(forward.batch)

    def solve(self) -> list[OptimizedValue]:
        record = self._step(0)
        for step in range(1, self.settings.num_steps):
            earlier, record = record, self._step(step)
            self._take(earlier)
            if not self.open:
                break
            num_ended = len(self.edits) - len(self.open)
            if num_ended >= LEAVING_SHARE * len(self.edits):
                self._store(set(self.edits) - self.open)
                self._let_leave()
        self._take(record)
        self._store(set(self.edits))
        return self.results

    def _step(self, step: int) -> _StepRecord:
        """Launch one evaluation and the update that follows it."""
        settings, state = self.settings, self.state
        is_last = step == settings.num_steps - 1
        delta_ED = state.delta_ED.detach().requires_grad_(True)
        with torch.enable_grad():
            total_E, parts = value_losses(
                self.forward, delta_ED, state, settings, self.max_logits, self.mean, needs_gradient=not is_last
            )
            below_E = total_E.detach() < settings.early_stop_loss
            for term in self.terms:
                parts[term.name] = term.loss(delta_ED, step)
                total_E = total_E + parts[term.name]
        rows = LateRead(torch.stack([total_E, *parts.values(), below_E.to(total_E)], 1))
        self.running_E = self.running_E & ~below_E
        if not is_last:
            (gradient_ED,) = torch.autograd.grad(total_E.sum(), delta_ED)
            scales = adam_scales(step + 1, settings.lr)
            stepped_ED = state.stepped(gradient_ED, *scales, settings.clamp_factor)
            state.delta_ED = torch.where(self.running_E[:, None], stepped_ED, state.delta_ED)
        return _StepRecord(step, self.edits, ("loss", *parts), rows)

    def _take(self, record: _StepRecord) -> None:
        """Read the losses of a step into the results of the edits that it did not find ended."""
        ended = []
        is_last = record.step == self.settings.num_steps - 1
        for edit, (*losses, below) in zip(record.edits, record.rows.wait().tolist(), strict=True):
            if edit not in self.open:
                continue
            value = self.results[edit]
            value.losses.append(dict(zip(record.names, losses, strict=True)))
            if below or is_last:
                ended.append(edit)
                value.num_updates = record.step
                value.stop_reason = "loss" if below else "steps"
        self.open -= set(ended)
        if ended:
            self.progress(len(ended))

    def _store(self, edits: set[int]) -> None:
        """Write the offsets of edits of the batch into the results."""
        state, bound_E = self.state, self.settings.clamp_factor * self.state.v0_norm_E
        clamped = is_clamped(state.delta_ED.norm(dim=-1), bound_E).tolist()
        for position, edit in enumerate(self.edits):
            if edit in edits:
                value = self.results[edit]
                value.delta_D = state.delta_ED[position].clone()
                value.clamped = clamped[position] and value.num_updates > 0

    def _let_leave(self) -> None:
        """Drop the edits that have ended."""
        keep_E = torch.tensor([edit in self.open for edit in self.edits], device=self.running_E.device)
        self.edits = [edit for edit in self.edits if edit in self.open]
        self.state.select(keep_E)
        self.forward.select(keep_E)
        for term in self.terms:
            term.select(keep_E)
        self.running_E = self.running_E[keep_E]
        self.mean = GatheredLabels.of(self.forward.batch)
