"""Steps of the value optimization: settings, losses, Adam and results.

Shared by the loop of a CPU (:mod:`edit_hooks.locate.values.value_optimization`) and by the one of devices that run
ahead (:mod:`edit_hooks.locate.values.steps_ahead`).

Shapes: E running edits, N rewriting rows of an edit, L labels of the batch, M labels of an edit, R rows, d residual
width, f MLP width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from edit_hooks.locate.values.value_batch import (
    LABEL_STEP,
    Site,
    SiteActivations,
    ValueBatch,
    ValueForward,
    padded_to_step,
)
from edit_hooks.modeling.device.run_ahead import runs_ahead
from edit_hooks.modeling.forward.vocab_loss import OriginalLogits, vocab_losses

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class ValueSettings:
    """Hyper-parameters, named as in the editor configurations."""

    layer: int
    site: Site
    num_steps: int
    lr: float
    weight_decay: float
    clamp_factor: float
    kl_factor: float
    early_stop_loss: float


@dataclass
class OptimizedValue:
    """Result for one edit.

    Attributes:
        delta_D: the optimized offset. v0_D: the site's output for the bare prompt (norms refer to it).
        keys_NF, outputs_ND: input and output of the rewrite module at the fact token of each rewriting row.
        losses: one record per loss evaluation (total, nll, kl and weight_decay with their factors).
        num_updates: optimizer steps made. stop_reason: ``"loss"`` or ``"steps"``. clamped: on the ball at the end.
        notes: further numbers for the diagnostics; means over the requests of a joint edit.
    """

    delta_D: torch.Tensor
    v0_D: torch.Tensor
    keys_NF: torch.Tensor
    outputs_ND: torch.Tensor
    losses: list[dict[str, float]] = field(default_factory=list)
    num_updates: int = 0
    stop_reason: str = "steps"
    clamped: bool = False
    notes: dict[str, float] = field(default_factory=dict)


class Term(Protocol):
    """An additional loss term for the edits of one batch.

    Attributes:
        name: key of its values in the loss records.
    """

    name: str

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """Value [E] for the running edits at one evaluation, factor included."""

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""


# Makes the terms of the edits with the given indices, which are solved together.
TermMaker = Callable[[Sequence[int]], Sequence[Term]]


def initial_values(activations: SiteActivations, batch: ValueBatch) -> list[OptimizedValue]:
    """v0, keys and outputs of each edit on the unedited model.

    The first row of an edit is its bare prompt.
    """
    values = []
    for edit in range(len(batch.kl_row_E)):
        rows = (batch.edit_R == edit).nonzero()[:-1, 0]  # the last row is the KL row
        values.append(
            OptimizedValue(
                delta_D=torch.zeros_like(activations.site_RD[0]),
                v0_D=activations.site_RD[rows[0]].clone(),
                keys_NF=activations.keys_RF[rows].clone(),
                outputs_ND=activations.outputs_RD[rows].clone(),
            )
        )
    return values


@dataclass
class AdamState:
    """Offsets, Adam moments and original logits of the running edits.

    Offsets at several modules of an edit have an axis for these before the last one, and a norm and a ball each.

    Attributes:
        edits_E: numbers of the edits in the batch.
        delta_ED, first_ED, second_ED: offsets and their moments.
        v0_norm_E: norms of the unedited outputs.
    """

    edits_E: torch.Tensor
    delta_ED: torch.Tensor
    first_ED: torch.Tensor
    second_ED: torch.Tensor
    v0_norm_E: torch.Tensor
    original: OriginalLogits | None = None
    num_updates: int = 0

    @classmethod
    def start(cls, v0_ED: torch.Tensor) -> AdamState:
        zeros = torch.zeros_like(v0_ED)
        return cls(
            torch.arange(len(v0_ED), device=v0_ED.device), zeros, zeros.clone(), zeros.clone(), v0_ED.norm(dim=-1)
        )

    def record(self, results: Sequence[OptimizedValue], total_E: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        """Append the losses of one evaluation to the results."""
        rows = torch.stack([total_E, *parts.values()], 1).tolist()
        for edit, row in zip(self.edits_E.tolist(), rows, strict=True):
            results[edit].losses.append(dict(zip(("loss", *parts), row, strict=True)))

    def finish(
        self, results: list[OptimizedValue], done_E: torch.Tensor, below_E: torch.Tensor, settings: ValueSettings
    ) -> None:
        """Write the offsets of finished edits into the results."""
        for index in done_E.nonzero()[:, 0].tolist():
            value = results[int(self.edits_E[index])]
            value.delta_D = self.delta_ED[index].clone()
            value.num_updates = self.num_updates
            value.stop_reason = "loss" if below_E[index] else "steps"
            bound = settings.clamp_factor * self.v0_norm_E[index]
            value.clamped = bool(is_clamped(value.delta_D.norm(), bound)) and self.num_updates > 0

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        for name in ("edits_E", "delta_ED", "first_ED", "second_ED", "v0_norm_E"):
            setattr(self, name, getattr(self, name)[keep_E])
        if self.original is not None:
            self.original = self.original.select(keep_E)

    def update(self, gradient_ED: torch.Tensor, lr: float, clamp_factor: float) -> None:
        """One Adam step and the projection onto the ball of ``clamp_factor`` times the norm of the output.

        All running edits have made the same number of steps.
        """
        self.num_updates += 1
        self.delta_ED = self.stepped(gradient_ED, *adam_scales(self.num_updates, lr), clamp_factor)

    def stepped(
        self,
        gradient_ED: torch.Tensor,
        scale: float | torch.Tensor,
        correction: float | torch.Tensor,
        clamp_factor: float,
    ) -> torch.Tensor:
        """The offsets after a step with :func:`adam_scales`; the moments change in place."""
        beta1, beta2 = ADAM_BETAS
        self.first_ED.lerp_(gradient_ED, 1 - beta1)
        self.second_ED.mul_(beta2).addcmul_(gradient_ED, gradient_ED, value=1 - beta2)
        denominator = self.second_ED.sqrt() / correction + ADAM_EPS
        delta_ED = self.delta_ED - scale * self.first_ED / denominator
        norm_E = delta_ED.norm(dim=-1)
        bound_E = clamp_factor * self.v0_norm_E
        return torch.where((norm_E > bound_E)[..., None], delta_ED * (bound_E / norm_E)[..., None], delta_ED)


def is_clamped(norm: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Whether an offset of this norm lies on its ball."""
    return norm >= bound * (1 - 1e-5)


def adam_scales(num_updates: int, lr: float) -> tuple[float, float]:
    """Adam's step size and the root of its second correction, at an update counted from 1."""
    beta1, beta2 = ADAM_BETAS
    return lr / (1 - beta1**num_updates), (1 - beta2**num_updates) ** 0.5


# Mean over an edit's rows of the mean over a row's labels, [E], of values [L]; dtype and device as of a tensor [E].
LabelMean = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def value_losses(
    forward: ValueForward,
    delta_ED: torch.Tensor,
    state: AdamState,
    settings: ValueSettings,
    max_logits: int,
    mean: LabelMean,
    needs_gradient: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Total loss [E] and its parts (factors included) for the running edits."""
    batch = forward.batch
    hidden_ND = forward.hidden_at_labels(delta_ED)
    losses = vocab_losses(forward.lm_head, hidden_ND, batch.label_token_L, state.original, max_logits, needs_gradient)
    state.original = losses.original  # of the first evaluation, which runs with a zero offset
    nll_E, kl_E = mean(losses.nll_L, delta_ED), losses.kl_E.to(delta_ED.device)
    # The gradient of the norm at zero is zero, as torch.norm defines it.
    decay_E = delta_ED.norm(dim=1) / state.v0_norm_E**2
    parts = {"nll": nll_E, "kl": settings.kl_factor * kl_E, "weight_decay": settings.weight_decay * decay_E}
    return nll_E + parts["kl"] + parts["weight_decay"], parts


def mean_over_labels(batch: ValueBatch, nll_L: torch.Tensor, like_E: torch.Tensor) -> torch.Tensor:
    """Mean over an edit's rows of the mean over a row's labels, [E].

    The dtype and device are those of ``like_E`` [E].
    """
    weighted_L = nll_L.to(like_E) / _label_counts(batch)
    return like_E.new_zeros(len(like_E)).index_add(0, _edit_of_label(batch), weighted_L)


def label_mean(batch: ValueBatch) -> LabelMean:
    """The mean over the labels of a batch, on its device."""
    if runs_ahead(batch.edit_R.device):
        return GatheredLabels.of(batch)
    return functools.partial(mean_over_labels, batch)


def _edit_of_label(batch: ValueBatch) -> torch.Tensor:
    return batch.edit_R[batch.label_row_L]


def _label_counts(batch: ValueBatch) -> torch.Tensor:
    """For every label the number of labels of its row, times the number of rows of its edit that have labels, [L]."""
    labels_R = torch.bincount(batch.label_row_L, minlength=len(batch.ids_RT))
    rows_E = torch.bincount(batch.edit_R[labels_R > 0])
    return labels_R[batch.label_row_L] * rows_E[_edit_of_label(batch)]


@dataclass
class GatheredLabels:
    """The labels of every edit, side by side: a :data:`LabelMean` of fixed shapes.

    An edit reads its own labels only, so NaN in one edit stays there.

    Attributes:
        index_EM: their numbers; behind the last one of an edit, its first again. is_label_EM: False there.
        count_EM: what a label is divided by.
    """

    index_EM: torch.Tensor
    is_label_EM: torch.Tensor
    count_EM: torch.Tensor

    @classmethod
    def of(cls, batch: ValueBatch) -> GatheredLabels:
        edit_L = _edit_of_label(batch)
        labels_E = torch.bincount(edit_L, minlength=len(batch.kl_row_E))
        start_E1 = (labels_E.cumsum(0) - labels_E)[:, None]
        columns_M = torch.arange(int(labels_E.max()), device=edit_L.device)
        is_label_EM = columns_M < labels_E[:, None]
        index_EM = edit_L.argsort(stable=True)[torch.where(is_label_EM, start_E1 + columns_M, start_E1)]
        return cls(index_EM, is_label_EM, _label_counts(batch)[index_EM])

    def in_buckets(self) -> GatheredLabels:
        """With room for as many labels of an edit as a multiple of :data:`LABEL_STEP`."""
        index_EM = padded_to_step(self.index_EM, 1, LABEL_STEP)
        index_EM = torch.where(padded_to_step(self.is_label_EM, 1, LABEL_STEP), index_EM, self.index_EM[:, :1])
        is_label_EM = padded_to_step(self.is_label_EM, 1, LABEL_STEP)
        return GatheredLabels(index_EM, is_label_EM, padded_to_step(self.count_EM, 1, LABEL_STEP).clamp(min=1))

    def __call__(self, nll_L: torch.Tensor, like_E: torch.Tensor) -> torch.Tensor:
        weighted_EM = nll_L.to(like_E)[self.index_EM] / self.count_EM
        return weighted_EM.masked_fill(~self.is_label_EM, 0).sum(1)
