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
moments are per edit; finished edits leave the batch. On a GPU the same steps run without a read of their results by the
host (:mod:`edit_hooks.locate.values.steps_ahead`).

Methods with additional loss terms (BIRD, EVK-Align) pass a :class:`Term`. The early stop tests the loss without these
terms, so that a factor of zero reproduces the plain method exactly.

Shapes: E running edits, d residual width.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.locate.values.kept_values import KeptValues
from edit_hooks.locate.values.reference_forward import ReferenceForward
from edit_hooks.locate.values.steps_ahead import solve_ahead
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import Site, ValueBatch, ValueForward, ValueProblem
from edit_hooks.locate.values.value_steps import (
    AdamState,
    OptimizedValue,
    Term,
    TermMaker,
    ValueSettings,
    initial_values,
    mean_over_labels,
    value_losses,
)
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.device.run_ahead import runs_ahead
from edit_hooks.modeling.forward.lm_head import default_max_logits
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.memory import bytes_per_token, cache_bytes_per_token, free_cuda_bytes

MakeEngine = Callable[[nn.Module, ValueBatch, int, Site], ValueForward]

# Optimizes the offsets of a batch: forward passes, settings, bound on logits, terms, progress.
Solve = Callable[[ValueForward, ValueSettings, int, Sequence[Term], Callable[[int], None]], list[OptimizedValue]]


ENGINES: dict[str, MakeEngine] = {"fast": SuffixForward, "reference": ReferenceForward}


# Of a row's prefix while its batch is prepared: the cache that is extended, the extended one, and that of its group.
PREFIX_COPIES = 3


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

        On a GPU up to half of the free memory is used; on a CPU just enough for efficient matrix products. Sizes of a
        GPU are rounded, so that batches, on which the last bits depend, are the same in a run that is repeated
        with a little more or less free memory.
        """
        weight = model.get_input_embeddings().weight
        if weight.device.type != "cuda":
            return cls()
        bytes_per_logit = 4 * 4  # the logit, its exponential and their gradients, in float32
        budget = free_cuda_bytes(weight.device) // 2
        token_bytes = bytes_per_token(model)
        return cls(
            max_tokens=max(512, _rounded_down(budget // 2 // token_bytes)),
            max_logits=max(2**24, _rounded_down(budget // 2 // bytes_per_logit)),
            prefix_share=PREFIX_COPIES * cache_bytes_per_token(model) / token_bytes,
        )


def _rounded_down(number: int) -> int:
    """A positive number with its first two binary digits alone, which a small change of it seldom changes."""
    shift = max(number.bit_length() - 2, 0)
    return number >> shift << shift


def optimize_values(
    model: nn.Module,
    problems: Sequence[ValueProblem],
    settings: ValueSettings,
    engine: str = "fast",
    limits: ValueLimits | None = None,
    progress: Callable[[int], None] | None = None,
    terms: TermMaker | None = None,
    solve: Solve | None = None,
) -> list[OptimizedValue]:
    """Solve the value problems of independent edits, or find them solved (:mod:`edit_hooks.locate.values.kept_values`).

    Args:
        problems: per edit its rewriting rows (the bare prompt first) and its KL row.
        engine: ``"fast"`` (many edits at once, suffix only) or ``"reference"`` (one edit, full forward passes).
        limits: batch sizes; chosen for the device by default.
        progress: called with the number of edits finished since the last call.
        terms: makes additional loss terms.
        solve: optimizes a batch; by default Adam on the offsets, as above.

    Returns:
        One :class:`OptimizedValue` per problem, in the same order.
    """
    inner = unwrapped(model)
    limits = limits or ValueLimits.for_device(inner)
    if engine == "reference":
        limits = dataclasses.replace(limits, max_edits=1)
    values: dict[int, OptimizedValue] = {}
    report = progress or (lambda _count: None)
    keeps = KeptValues.of(inner, settings, engine, limits.max_logits) if solve is None and len(problems) > 1 else None
    if solve is None:
        solve = solve_ahead if engine == "fast" and runs_ahead(input_device(inner)) else _solve
    with frozen(inner):
        for chunk in split_problems(problems, limits):
            chunk_terms = terms(chunk) if terms is not None else ()
            batch = ValueBatch.of([problems[index] for index in chunk], input_device(inner))
            make = ENGINES[engine]
            if solve is solve_ahead and not chunk_terms:  # terms decide by the number of the step
                make = functools.partial(SuffixForward, may_be_recorded=True)
            forward = make(inner, batch, settings.layer, settings.site)
            entry = keeps.of_batch(forward) if keeps and not chunk_terms else None
            solved = entry.load(forward) if entry else None
            if solved is not None:
                report(len(chunk))
            else:
                began = time.perf_counter()
                solved = solve(forward, settings, limits.max_logits, chunk_terms, report)
                if entry:
                    entry.save(solved, time.perf_counter() - began)
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
    results = initial_values(forward.activations, forward.batch)
    state = AdamState.start(torch.stack([value.v0_D for value in results]))
    for step in range(settings.num_steps):
        delta_ED = state.delta_ED.detach().requires_grad_(True)
        is_last = step == settings.num_steps - 1
        with torch.enable_grad():
            mean = functools.partial(mean_over_labels, forward.batch)
            total_E, parts = value_losses(
                forward, delta_ED, state, settings, max_logits, mean, needs_gradient=not is_last
            )
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
