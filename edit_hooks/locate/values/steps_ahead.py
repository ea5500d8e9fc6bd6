"""Value optimization on a device that runs ahead of the host (:mod:`edit_hooks.modeling.device.run_ahead`).

The steps, losses and stop rules of :mod:`edit_hooks.locate.values.value_optimization`, without a read by the host that
the device would have to wait for. The losses of a step are read while the next step runs, so the host notices that an
edit has ended one step late. Its offset is the one of the step at which its loss fell below the bound all the same: the
device masks the updates of edits that have ended. They leave the batch together, as soon as they are a quarter of it.

The steps of a small batch wait for their launches, so the second one is recorded and replayed
(:mod:`edit_hooks.modeling.device.recording`), for later batches of the same shapes too. Nothing leaves such a batch.

Shapes: E edits of the batch, d residual width, P losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from edit_hooks.locate.values.suffix_forward import RECORDED, SuffixForward
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
from edit_hooks.modeling.device.recording import recording_of, tensors_in
from edit_hooks.modeling.device.run_ahead import LateRead

LEAVING_SHARE = 0.25  # of a batch; every time that edits leave it, the host waits for the device
FEWEST_RECORDED = 3  # steps; a recording takes the time of about two


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
        step: its number. edits: the edits of the batch at that step. names: of the losses. rows: ``losses_EP``.
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
        number_1: of the next step. scale_S, correction_S: Adam's, by step.
        losses_EP: of the last step; behind the losses 1 where the total without terms is below the bound.
        replay: runs a step, if steps are recorded.
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
        self.number_1 = self.state.edits_E.new_zeros(1)
        scales = [adam_scales(number + 1, settings.lr) for number in range(settings.num_steps)]
        self.scale_S, self.correction_S = torch.tensor(scales, dtype=torch.float64).to(self.state.delta_ED).T
        self.mean = GatheredLabels.of(forward.batch)
        self.names: tuple[str, ...] = ()
        self.losses_EP: torch.Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.is_recorded = isinstance(forward, SuffixForward) and forward.in_buckets
        if self.is_recorded:
            self.mean, self.forward.batch = self.mean.in_buckets(), forward.batch.with_labels_in_buckets()

    def solve(self) -> list[OptimizedValue]:
        record = self._step(0)
        if self.is_recorded and self.settings.num_steps > FEWEST_RECORDED:
            self._record()
        for step in range(1, self.settings.num_steps):
            earlier, record = record, self._step(step)
            self._take(earlier)
            if not self.open:
                break
            num_ended = len(self.edits) - len(self.open)
            if num_ended >= LEAVING_SHARE * len(self.edits) and not self.is_recorded:
                self._store(set(self.edits) - self.open)
                self._let_leave()
        self._take(record)
        self._store(set(self.edits))
        return self.results

    def _step(self, step: int) -> _StepRecord:
        """Launch one evaluation and the update that follows it."""
        if self.replay is None:
            self._launch(step)
        else:
            self.replay()
        assert self.losses_EP is not None
        return _StepRecord(step, self.edits, self.names, LateRead(self.losses_EP))

    def _launch(self, step: int) -> None:
        """The number of the step decides about terms and gradients only; everything else reads ``number_1``."""
        settings, state = self.settings, self.state
        last = settings.num_steps - 1
        delta_ED = state.delta_ED.detach().requires_grad_(True)
        with torch.enable_grad():
            total_E, parts = value_losses(
                self.forward, delta_ED, state, settings, self.max_logits, self.mean, needs_gradient=step < last
            )
            below_E = total_E.detach() < settings.early_stop_loss
            for term in self.terms:
                parts[term.name] = term.loss(delta_ED, step)
                total_E = total_E + parts[term.name]
            total = total_E.sum()
        self._keep_losses({"loss": total_E, **parts}, below_E)
        self.running_E.logical_and_(~below_E)
        if step < last:
            (gradient_ED,) = torch.autograd.grad(total, delta_ED)
            scale_1, correction_1 = (one_S.gather(0, self.number_1) for one_S in (self.scale_S, self.correction_S))
            stepped_ED = state.stepped(gradient_ED, scale_1, correction_1, settings.clamp_factor)
            # A recorded step does not know that it is the last one.
            moves_E = self.running_E & (self.number_1 < last)
            state.delta_ED.copy_(torch.where(moves_E[:, None], stepped_ED, state.delta_ED))
        self.number_1 += 1

    def _keep_losses(self, losses: dict[str, torch.Tensor], below_E: torch.Tensor) -> None:
        rows_EP = torch.stack([*losses.values(), below_E.to(losses["loss"])], 1).detach()
        if self.losses_EP is None:
            self.names, self.losses_EP = tuple(losses), rows_EP
        else:
            self.losses_EP.copy_(rows_EP)

    def _record(self) -> None:
        """Replay the steps after the first one, if they can be recorded."""
        assert isinstance(self.forward, SuffixForward) and self.losses_EP is not None
        forward, state, settings = self.forward, self.state, self.settings
        moving = [state.delta_ED, state.first_ED, state.second_ED, self.losses_EP, self.running_E, self.number_1]
        constant = [state.v0_norm_E, state.original, self.mean, self.scale_S, self.correction_S]
        tensors = tensors_in([moving, forward.step_tensors(), constant])
        key = (forward.layer, forward.site, settings, self.max_logits)
        recording = recording_of(forward.model, RECORDED, key, lambda: self._launch(1), tensors, moving[:4])
        if recording is not None:
            state.delta_ED, state.first_ED, state.second_ED, self.losses_EP, *_ = recording.tensors
            self.replay = recording.replay

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
        self.losses_EP = None
        self.mean = GatheredLabels.of(self.forward.batch)
