"""Value optimization: the offset that makes the target likely.

All locate-then-edit editors share it. The loss of one edit (ROME, eq. 4, with the weight decay of the released code):

    L = NLL + kl_factor * KL(edited || original) + weight_decay * ||delta|| / ||v0||^2

NLL is the mean over the edit's N rows of the mean over its m target tokens; the KL term is read at the fact token of
the row "SUBJECT is a"; v0 is the site's output for the bare prompt. Adam optimizes the offset alone: at most
``num_steps`` evaluations, one update fewer, early stop when the total loss falls below ``early_stop_loss``, and after
every update a projection onto the ball ||delta|| <= clamp_factor * ||v0||. All releases count so but the later rewrite
of AlphaEdit, which makes an update after every evaluation: S of its steps are ``num_steps`` S + 1.

Independent edits share frozen weights only, so a batch of them is solved in one forward and backward pass: the gradient
of the sum of losses with respect to one edit's offset is that edit's own gradient. Norms, stops, projections and Adam
moments are per edit; finished edits leave the batch.

Methods with additional loss terms (BIRD, EVK-Align) pass a :class:`Term`. The early stop tests the loss without these
terms, so that a factor of zero reproduces the plain method exactly.

Shapes: E running edits, N rewriting rows of an edit, L labels of the batch, R rows, d residual width, f MLP width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.locate.values.reference_forward import ReferenceForward
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import Site, SiteActivations, ValueBatch, ValueForward, ValueProblem
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.forward.lm_head import default_max_logits
from edit_hooks.modeling.forward.vocab_loss import OriginalLogits, vocab_losses
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.memory import bytes_per_token, cache_bytes_per_token, free_cuda_bytes

MakeEngine = Callable[[nn.Module, ValueBatch, int, Site], ValueForward]


ENGINES: dict[str, MakeEngine] = {"fast": SuffixForward, "reference": ReferenceForward}


# Of a row's prefix while its batch is prepared: the cache that is extended, the extended one, and that of its group.
PREFIX_COPIES = 3

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


@dataclass(frozen=True)
class ValueLimits:
    """Bounds on the size of a batch. A batch always contains at least one edit.

    Attributes:
        max_tokens: suffix tokens whose activations are held for the backward pass.
        prefix_share: what a column of a row's prefix cache takes, in suffix tokens; 0 where only speed bounds a batch.
        max_logits: logits held (positions times tokens), approximately.
        max_edits: edits solved together.
    """

    max_tokens: int = 320
    max_logits: int = default_max_logits(torch.device("cpu"))
    max_edits: int = 1024
    prefix_share: float = 0.0

    @classmethod
    def for_device(cls, model: Any) -> ValueLimits:
        """Limits for the model's device.

        On a GPU half of the free memory is used; on a CPU just enough for efficient matrix products.
        """
        weight = model.get_input_embeddings().weight
        if weight.device.type != "cuda":
            return cls()
        bytes_per_logit = 4 * 4  # the logit, its exponential and their gradients, in float32
        budget = free_cuda_bytes(weight.device) // 2
        token_bytes = bytes_per_token(model)
        return cls(
            max_tokens=max(512, budget // 2 // token_bytes),
            max_logits=max(2**24, budget // 2 // bytes_per_logit),
            prefix_share=PREFIX_COPIES * cache_bytes_per_token(model) / token_bytes,
        )


def optimize_values(
    model: nn.Module,
    problems: Sequence[ValueProblem],
    settings: ValueSettings,
    engine: str = "fast",
    limits: ValueLimits | None = None,
    progress: Callable[[int], None] | None = None,
    terms: TermMaker | None = None,
) -> list[OptimizedValue]:
    """Solve the value problems of independent edits.

    Args:
        problems: per edit its rewriting rows (the bare prompt first) and its KL row.
        engine: ``"fast"`` (many edits at once, suffix only) or ``"reference"`` (one edit, full forward passes).
        limits: batch sizes; chosen for the device by default.
        progress: called with the number of edits finished since the last call.
        terms: makes additional loss terms.

    Returns:
        One :class:`OptimizedValue` per problem, in the same order.
    """
    inner = unwrapped(model)
    limits = limits or ValueLimits.for_device(inner)
    if engine == "reference":
        limits = dataclasses.replace(limits, max_edits=1)
    values: dict[int, OptimizedValue] = {}
    with frozen(inner):
        for chunk in split_problems(problems, limits):
            chunk_terms = terms(chunk) if terms is not None else ()
            batch = ValueBatch.of([problems[index] for index in chunk], input_device(inner))
            forward = ENGINES[engine](inner, batch, settings.layer, settings.site)
            solved = _solve(forward, settings, limits.max_logits, chunk_terms, progress or (lambda _count: None))
            values.update(zip(chunk, solved, strict=True))
    return [values[index] for index in range(len(problems))]


def split_problems(problems: Sequence[ValueProblem], limits: ValueLimits) -> list[list[int]]:
    """Split edits into chunks that are solved together, sorted by suffix length.

    The cost of an edit is its number of suffix tokens without padding; the forward passes group rows by length anyway.
    The prefix caches of a batch have a row each, the KL row included, and are as wide as the longest of them.
    """

    def suffix_lengths(index: int) -> list[int]:
        """Tokens from the fact token on, per row; the KL row has one that matters."""
        return [len(row.ids) - row.position for row in problems[index][0]] + [1]

    chunks: list[list[int]] = []
    num_tokens = num_rows = width = 0
    for index in sorted(range(len(problems)), key=lambda index: max(suffix_lengths(index))):
        rows = [*problems[index][0], problems[index][1]]
        cost, longest = sum(suffix_lengths(index)), max(row.position for row in rows)
        prefix_cost = limits.prefix_share * (num_rows + len(rows)) * max(width, longest)
        is_full = num_tokens + cost + prefix_cost > limits.max_tokens
        if not chunks or is_full or len(chunks[-1]) >= limits.max_edits:
            chunks.append([])
            num_tokens = num_rows = width = 0
        chunks[-1].append(index)
        num_tokens, num_rows, width = num_tokens + cost, num_rows + len(rows), max(width, longest)
    return chunks


def _solve(
    forward: ValueForward,
    settings: ValueSettings,
    max_logits: int,
    terms: Sequence[Term],
    progress: Callable[[int], None],
) -> list[OptimizedValue]:
    """Optimize the offsets of all edits of a batch."""
    results = _initial_values(forward.activations, forward.batch)
    state = AdamState.start(torch.stack([value.v0_D for value in results]))
    for step in range(settings.num_steps):
        delta_ED = state.delta_ED.detach().requires_grad_(True)
        is_last = step == settings.num_steps - 1
        with torch.enable_grad():
            total_E, parts = _losses(forward, delta_ED, state, settings, max_logits, needs_gradient=not is_last)
            below_E = total_E.detach() < settings.early_stop_loss
            for term in terms:
                parts[term.name] = term.loss(delta_ED, step)
                total_E = total_E + parts[term.name]
        done_E = below_E | is_last
        state.record(results, total_E, parts)
        if not done_E.all():
            (gradient_ED,) = torch.autograd.grad(total_E[~done_E].sum(), delta_ED)
        del total_E, parts  # with their graph, before the next one is built
        if done_E.any():
            state.finish(results, done_E, below_E, settings)
            progress(int(done_E.sum()))
            if done_E.all():
                break
            state.select(~done_E)
            forward.select(~done_E)
            for term in terms:
                term.select(~done_E)
            gradient_ED = gradient_ED[~done_E]
        state.update(gradient_ED, settings.lr, settings.clamp_factor)
    return results


def _initial_values(activations: SiteActivations, batch: ValueBatch) -> list[OptimizedValue]:
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
            value.clamped = bool(value.delta_D.norm() >= bound * (1 - 1e-5)) and self.num_updates > 0

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
        beta1, beta2 = ADAM_BETAS
        self.first_ED.lerp_(gradient_ED, 1 - beta1)
        self.second_ED.mul_(beta2).addcmul_(gradient_ED, gradient_ED, value=1 - beta2)
        scale = lr / (1 - beta1**self.num_updates)
        denominator = self.second_ED.sqrt() / (1 - beta2**self.num_updates) ** 0.5 + ADAM_EPS
        delta_ED = self.delta_ED - scale * self.first_ED / denominator
        norm_E = delta_ED.norm(dim=-1)
        bound_E = clamp_factor * self.v0_norm_E
        self.delta_ED = torch.where((norm_E > bound_E)[..., None], delta_ED * (bound_E / norm_E)[..., None], delta_ED)


def _losses(
    forward: ValueForward,
    delta_ED: torch.Tensor,
    state: AdamState,
    settings: ValueSettings,
    max_logits: int,
    needs_gradient: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Total loss [E] and its parts (factors included) for the running edits."""
    batch = forward.batch
    hidden_ND = forward.hidden_at_labels(delta_ED)
    losses = vocab_losses(forward.lm_head, hidden_ND, batch.label_token_L, state.original, max_logits, needs_gradient)
    state.original = losses.original  # of the first evaluation, which runs with a zero offset
    nll_E, kl_E = mean_over_labels(batch, losses.nll_L, delta_ED), losses.kl_E.to(delta_ED.device)
    # The gradient of the norm at zero is zero, as torch.norm defines it.
    decay_E = delta_ED.norm(dim=1) / state.v0_norm_E**2
    parts = {"nll": nll_E, "kl": settings.kl_factor * kl_E, "weight_decay": settings.weight_decay * decay_E}
    return nll_E + parts["kl"] + parts["weight_decay"], parts


def mean_over_labels(batch: ValueBatch, nll_L: torch.Tensor, like_E: torch.Tensor) -> torch.Tensor:
    """Mean over an edit's rows of the mean over a row's labels, [E].

    The dtype and device are those of ``like_E`` [E].
    """
    labels_R = torch.bincount(batch.label_row_L, minlength=len(batch.ids_RT))
    rows_E = torch.bincount(batch.edit_R[labels_R > 0])
    edit_L = batch.edit_R[batch.label_row_L]
    weighted_L = nll_L.to(like_E) / (labels_R[batch.label_row_L] * rows_E[edit_L])
    return like_E.new_zeros(len(like_E)).index_add(0, edit_L, weighted_L)
