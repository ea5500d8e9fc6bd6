"""The value optimization shared by the locate-then-edit editors: find the offset that makes the target likely.

One edit's loss (sheet of ROME and its descendants; ROME, eq. 4):

    L = NLL + kl_factor * KL(edited || original) + weight_decay * ||delta|| / ||v0||^2

NLL is the mean over the edit's N rows of the mean over its m target tokens; the KL term is read at the fact token of
the row "SUBJECT is a"; v0 is the site's output for the bare prompt. Adam over the offset only, at most ``num_steps``
evaluations and one update fewer, a stop when the total loss falls below ``early_stop_loss``, and a projection onto the
ball ||delta|| <= clamp_factor * ||v0|| after every update.

Independent edits share the frozen weights only, so a batch of them is solved in one forward and backward: the gradient
of the sum of losses with respect to one edit's offset is that edit's own gradient. Norms, stops, projections and Adam
moments are per edit; finished edits leave the batch.

Methods that add a term to this loss (BIRD, EVK-Align) hand over a :class:`Term`; the early stop tests the loss without
it, so that a factor of zero reproduces the plain method exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.locate.rows import Row
from edit_hooks.locate.value_batch import Batch, Captured, Site
from edit_hooks.locate.value_forward import ReferenceForward, SuffixForward
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.lm_head import logits_at_once
from edit_hooks.modeling.vocab_loss import Original, likelihoods

Forward = type[SuffixForward] | type[ReferenceForward]


ENGINES: dict[str, Forward] = {"fast": SuffixForward, "reference": ReferenceForward}


ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class ValueSettings:
    """Hyper-parameters of the value optimization; the names follow the editor configurations."""

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
    """

    delta_D: torch.Tensor
    v0_D: torch.Tensor
    keys_NF: torch.Tensor
    outputs_ND: torch.Tensor
    losses: list[dict[str, float]] = field(default_factory=list)
    num_updates: int = 0
    stop_reason: str = "steps"
    clamped: bool = False


ValueProblem = tuple[Sequence[Row], Row]


class Term(Protocol):
    """One more part of the loss of the edits of one batch.

    Attributes:
        name: under which its values stand in the loss records.
    """

    name: str

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """Its value [E], factor included, for the running edits at one evaluation of the loss."""

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""


# Makes the terms of the edits with the given indices, which are solved together.
TermMaker = Callable[[Sequence[int]], Sequence[Term]]


@dataclass(frozen=True)
class ValueLimits:
    """How much of the value optimization is computed at once. A batch always holds at least one edit.

    Attributes:
        max_tokens: suffix tokens whose activations are held for the backward pass.
        max_logits: logits held (positions times words), about.
        max_edits: edits solved together.
    """

    max_tokens: int = 320
    max_logits: int = logits_at_once(torch.device("cpu"))
    max_edits: int = 1024

    @classmethod
    def for_device(cls, model: Any) -> ValueLimits:
        """On a GPU what half of its free memory holds; on a CPU just enough for efficient matrix products."""
        weight = model.get_input_embeddings().weight
        if weight.device.type != "cuda":
            return cls()
        config = model.config.get_text_config()
        width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        per_token = config.num_hidden_layers * (16 * config.hidden_size + 4 * width) * weight.element_size()
        per_logit = 4 * 4  # itself, its exponential and their gradients, in float32
        budget = torch.cuda.mem_get_info(weight.device)[0] // 2
        return cls(max_tokens=max(512, budget // 2 // per_token), max_logits=max(2**24, budget // 2 // per_logit))


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
        engine: ``"fast"`` (many edits at once, suffix only) or ``"reference"`` (one edit, full forwards).
        limits: how much is computed at once; chosen for the device when absent.
        progress: called with the number of edits finished since the last call.
        terms: makes further terms of the loss.

    Returns:
        One :class:`OptimizedValue` per problem, in the same order.
    """
    inner = unwrapped(model)
    limits = limits or ValueLimits.for_device(inner)
    if engine == "reference":
        limits = dataclasses.replace(limits, max_edits=1)
    results: list[OptimizedValue | None] = [None] * len(problems)
    with frozen(inner):
        for chunk in chunks_of(problems, limits):
            more = terms(chunk) if terms is not None else ()
            values = _solve(inner, [problems[index] for index in chunk], settings, engine, limits, progress, more)
            for index, value in zip(chunk, values, strict=True):
                results[index] = value
    return results  # type: ignore[return-value]


def chunks_of(problems: Sequence[ValueProblem], limits: ValueLimits) -> list[list[int]]:
    """Indices of edits solved together: similar suffix lengths side by side, within the limits."""

    def suffixes(index: int) -> list[int]:
        """Tokens from the fact token on, per row; of the KL row only one matters."""
        return [len(row.ids) - row.position for row in problems[index][0]] + [1]

    chunks: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(problems)), key=lambda index: max(suffixes(index))):
        own = sum(suffixes(index))
        if not chunks or tokens + own > limits.max_tokens or len(chunks[-1]) >= limits.max_edits:
            chunks.append([])
            tokens = 0
        chunks[-1].append(index)
        tokens += own
    return chunks


def _solve(
    model: nn.Module,
    problems: Sequence[ValueProblem],
    settings: ValueSettings,
    engine: str,
    limits: ValueLimits,
    progress: Callable[[int], None] | None,
    terms: Sequence[Term],
) -> list[OptimizedValue]:
    device = input_device(model)
    batch = Batch.of(problems, device)
    forward = ENGINES[engine](model, batch, settings.layer, settings.site)
    results = _initial_values(forward.captured, batch, len(problems))
    state = _State.start(torch.stack([value.v0_D for value in results]))
    for step in range(settings.num_steps):
        delta_ED = state.delta_ED.detach().requires_grad_(True)
        with torch.enable_grad():
            is_last = step == settings.num_steps - 1
            total_E, parts = _losses(forward, delta_ED, state, settings, limits.max_logits, not is_last)
            reached_E = total_E.detach() < settings.early_stop_loss
            for term in terms:
                parts[term.name] = term.loss(delta_ED, step)
                total_E = total_E + parts[term.name]
        done_E = reached_E | is_last
        state.record(results, total_E, parts)
        if not done_E.all():
            (gradient_ED,) = torch.autograd.grad(total_E[~done_E].sum(), delta_ED)
        del total_E, parts
        if done_E.any():
            state.finish(results, done_E, reached_E, settings)
            if progress is not None:
                progress(int(done_E.sum()))
            if done_E.all():
                break
            state.select(~done_E)
            for part in (forward, *terms):
                part.select(~done_E)
            gradient_ED = gradient_ED[~done_E]
        state.update(gradient_ED, settings)
    return results


def _initial_values(captured: Captured, batch: Batch, num_edits: int) -> list[OptimizedValue]:
    """v0, keys and outputs of each edit from the unedited forward; the first row of an edit is its bare prompt."""
    values = []
    for edit in range(num_edits):
        rows = (batch.edit_R == edit).nonzero()[:-1, 0]  # the last row is the KL row
        values.append(
            OptimizedValue(
                delta_D=torch.zeros_like(captured.site_RD[0]),
                v0_D=captured.site_RD[rows[0]].clone(),
                keys_NF=captured.keys_RF[rows].clone(),
                outputs_ND=captured.outputs_RD[rows].clone(),
            )
        )
    return values


@dataclass
class _State:
    """Optimizer state of the edits still running."""

    edits_E: torch.Tensor
    delta_ED: torch.Tensor
    first_ED: torch.Tensor
    second_ED: torch.Tensor
    v0_norm_E: torch.Tensor
    original: Original | None = None
    num_updates: int = 0

    @classmethod
    def start(cls, v0_ED: torch.Tensor) -> _State:
        zeros = torch.zeros_like(v0_ED)
        return cls(
            torch.arange(len(v0_ED), device=v0_ED.device), zeros, zeros.clone(), zeros.clone(), v0_ED.norm(dim=1)
        )

    def record(self, results: list[OptimizedValue], total_E: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        rows = torch.stack([total_E, *parts.values()], 1).tolist()
        for edit, row in zip(self.edits_E.tolist(), rows, strict=True):
            results[edit].losses.append(dict(zip(("loss", *parts), row, strict=True)))

    def finish(
        self, results: list[OptimizedValue], done_E: torch.Tensor, reached_E: torch.Tensor, settings: ValueSettings
    ) -> None:
        for index in done_E.nonzero()[:, 0].tolist():
            value = results[int(self.edits_E[index])]
            value.delta_D = self.delta_ED[index].clone()
            value.num_updates = self.num_updates
            value.stop_reason = "loss" if reached_E[index] else "steps"
            bound = settings.clamp_factor * self.v0_norm_E[index]
            value.clamped = bool(value.delta_D.norm() >= bound * (1 - 1e-5)) and self.num_updates > 0

    def select(self, keep_E: torch.Tensor) -> None:
        for name in ("edits_E", "delta_ED", "first_ED", "second_ED", "v0_norm_E"):
            setattr(self, name, getattr(self, name)[keep_E])
        if self.original is not None:
            self.original = self.original.select(keep_E)

    def update(self, gradient_ED: torch.Tensor, settings: ValueSettings) -> None:
        """One Adam step (all running edits have made the same number of steps) and the projection onto the ball."""
        self.num_updates += 1
        beta1, beta2 = ADAM_BETAS
        self.first_ED.lerp_(gradient_ED, 1 - beta1)
        self.second_ED.mul_(beta2).addcmul_(gradient_ED, gradient_ED, value=1 - beta2)
        scale = settings.lr / (1 - beta1**self.num_updates)
        denominator = self.second_ED.sqrt() / (1 - beta2**self.num_updates) ** 0.5 + ADAM_EPS
        delta_ED = self.delta_ED - scale * self.first_ED / denominator
        norm_E = delta_ED.norm(dim=1)
        bound_E = settings.clamp_factor * self.v0_norm_E
        self.delta_ED = torch.where((norm_E > bound_E)[:, None], delta_ED * (bound_E / norm_E)[:, None], delta_ED)


def _losses(
    forward: SuffixForward | ReferenceForward,
    delta_ED: torch.Tensor,
    state: _State,
    settings: ValueSettings,
    max_logits: int,
    wants_gradient: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Total loss [E] and its parts (factors included) for the running edits."""
    batch = forward.batch
    states_ND = forward.states(delta_ED)
    found = likelihoods(forward.readout, states_ND, batch.label_token_L, state.original, max_logits, wants_gradient)
    state.original = found.original  # of the first evaluation, which runs with a zero offset
    nll_E, kl_E = mean_over_labels(batch, found.nll_L, delta_ED), found.kl_E.to(delta_ED.device)
    # The norm's gradient at zero is taken as zero, as torch.norm does.
    decay_E = delta_ED.norm(dim=1) / state.v0_norm_E**2
    parts = {"nll": nll_E, "kl": settings.kl_factor * kl_E, "weight_decay": settings.weight_decay * decay_E}
    return nll_E + parts["kl"] + parts["weight_decay"], parts


def mean_over_labels(batch: Batch, nll_L: torch.Tensor, like_E: torch.Tensor) -> torch.Tensor:
    """Per edit the mean over its rows of the mean over a row's labels, [E]; type, device and E as ``like_E`` has."""
    labels_R = torch.bincount(batch.label_row_L, minlength=len(batch.ids_RT))
    rows_E = torch.bincount(batch.edit_R[labels_R > 0])
    edit_L = batch.edit_R[batch.label_row_L]
    weighted_L = nll_L.to(like_E) / (labels_R[batch.label_row_L] * rows_E[edit_L])
    return like_E.new_zeros(len(like_E)).index_add(0, edit_L, weighted_L)
