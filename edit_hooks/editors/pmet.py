"""PMET: MEMIT with a second, discarded offset at the attention output.

Method of "PMET: Precise Model Editing in a Transformer".

Two offsets are optimized together at the fact token of the last edited block L, one at the output of the attention
projection and one at that of the MLP projection. The attention learns general patterns that need no storage, so only
the MLP's target z = v0 + delta is written. Each offset has its own weight decay and ball; the loss is

    nll_factor * NLL + kl_factor * KL + weight_decay * (||delta_a|| / ||v0_a||^2 + ||delta_m|| / ||v0_m||^2)

As in the release, once every target token is the most likely one at its position, the NLL counts a tenth in the next
evaluation, and the run ends if the KL part is at most 0.01. It also ends below ``early_stop_loss``.

The layers follow as in MEMIT, but residuals are those of the MLP projection's output at block L, spread by square
roots:

    R = (Z - V_L) / sqrt(n - i),   W <- W + R K^T (lambda C + K K^T)^-1.

Where a norm follows the MLP (Gemma, OLMo 2), ``residual_mode: normalized`` measures n(z) - n(V_L), the difference in
block L's contribution to the residual stream, and each layer takes the MLP output whose norm is nearest to its share
of it (:mod:`edit_hooks.locate.values.post_norm`). ``faithful`` is the release's arithmetic.

Shapes: E running edits, R rows, L labels, d residual width; the axis of length 2 is attention, MLP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.job import EditJob
from edit_hooks.editors.memit import MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.locate.values.reference_forward import ReferenceForward
from edit_hooks.locate.values.suffix_forward import CachedModule, RowGroup, SuffixForward, add_at_first
from edit_hooks.locate.values.value_batch import ReadActivations, Site, SiteActivations, ValueBatch, ValueProblem
from edit_hooks.locate.values.value_optimization import ValueLimits, split_problems
from edit_hooks.locate.values.value_steps import AdamState, OptimizedValue, Term, label_mean
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.device.run_ahead import LateRead, launch_early
from edit_hooks.modeling.forward.vocab_loss import VocabLosses, vocab_losses
from edit_hooks.modeling.hooks import frozen, hooks, on_output, record_at
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

SATISFIED_NLL_SHARE, SATISFIED_KL = 0.1, 0.01


@dataclass(kw_only=True)
class PMETConfig(MEMITConfig):
    """MEMIT's settings with the release's values for GPT-J."""

    num_steps: int = config_field(
        "loss evaluations of the value optimization; one update fewer is made", within=POSITIVE, default=30
    )
    lr: float = config_field("Adam learning rate of the offsets", within=POSITIVE, default=0.2)
    kl_factor: float = config_field(
        "factor of the KL term that keeps the prediction after the subject", within=NON_NEGATIVE, default=1.0
    )
    nll_factor: float = config_field("factor of the target's negative log-likelihood", within=POSITIVE, default=1.0)


@dataclass
class PairValue(OptimizedValue):
    """A value and an offset at the attention output, which is not written."""

    attention_delta_D: torch.Tensor | None = None


class PMET(ResidualSpreadingEditor[PMETConfig]):
    """MEMIT with targets optimized jointly with the attention output."""

    name = "pmet"
    config_class = PMETConfig
    config_folders = ("pmet",)
    measures_output = True
    # At the last token: half of an offset at the subject's belongs to the attention and is not written.
    contract_settings: ClassVar[Settings] = {**MEMIT_CONTRACT_SETTINGS, "fact_token": "last"}

    def divisor(self, layers_left: int) -> float:
        return layers_left**0.5

    def optimize(
        self, job: EditJob[PMETConfig], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        config, model = job.config, job.model
        engine = PairReference if config.engine == "reference" else PairSuffix

        def make_forward(batch: ValueBatch) -> PairForward:
            return engine(model, batch, config.edited_layers[-1], "mlp")

        make_terms = self.terms(job, make_forward)
        limits = ValueLimits.for_device(model)
        if config.engine == "reference":
            limits = dataclasses.replace(limits, max_edits=1)
        values: dict[int, OptimizedValue] = {}
        with frozen(model):
            for chunk in split_problems(problems, limits):
                forward = make_forward(ValueBatch.of([problems[index] for index in chunk], input_device(model)))
                terms = make_terms(chunk) if make_terms is not None else ()
                solved = _PairOptimization(forward, config, terms, limits.max_logits).run(job.progress)
                values.update(zip(chunk, solved, strict=True))
        return [values[index] for index in range(len(problems))]


class PairSuffix(SuffixForward):
    """Fast forward passes with offsets at both projections of one block, [E, 2 d].

    The attention's offset comes first.

    The block's attention is cached like the blocks below. Its MLP depends on the attention's offset, so it runs in
    every step.
    """

    def _cached_modules(self) -> list[CachedModule]:
        attention, _, *below = super()._cached_modules()
        return [dataclasses.replace(attention, takes_offset=True), *below]

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        return _record_both(super()._recording(column_R), self, column_R)

    @contextlib.contextmanager
    def _offsets_added(self, group: RowGroup, offset_GD: torch.Tensor) -> Iterator[None]:
        attention_GD, mlp_GD = offset_GD.chunk(2, dim=1)
        rewrite = self.model.get_submodule(self.arch.rewrite_name(self.layer))
        at_mlp = on_output(rewrite, lambda hidden: add_at_first(hidden, mlp_GD))
        with super()._offsets_added(group, attention_GD), hooks(at_mlp):
            yield


class PairReference(ReferenceForward):
    """Plain forward passes with offsets at both projections of one block, [E, 2 d].

    The attention's offset comes first.
    """

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        return _record_both(super()._recording(column_R), self, column_R)

    def _adding(self, delta_ED: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        names = (*self.arch.module_names("attention_out", self.layer), self.arch.rewrite_name(self.layer))
        both = zip(names, delta_ED.chunk(2, dim=1), strict=True)
        return hooks(*(on_output(self.model.get_submodule(name), self._plus(offset)) for name, offset in both))


PairForward = PairSuffix | PairReference


@contextlib.contextmanager
def _record_both(
    recording: contextlib.AbstractContextManager[ReadActivations], forward: PairForward, column_R: torch.Tensor
) -> Iterator[ReadActivations]:
    """Record the outputs of both projections as the site's activations, [R, 2 d]."""
    attention = forward.model.get_submodule(*forward.arch.module_names("attention_out", forward.layer))
    records: dict[str, torch.Tensor] = {}

    def read_both() -> SiteActivations:
        activations = read()
        attention_RD = records["attention"].to(activations.outputs_RD.device)
        return dataclasses.replace(activations, site_RD=torch.cat([attention_RD, activations.outputs_RD], 1))

    with recording as read, hooks(on_output(attention, record_at(records, "attention", column_R))):
        yield read_both


class _Evaluation(NamedTuple):
    """Losses of the running edits at one step.

    Attributes:
        total_E: the loss, additional terms included. parts: its parts, factors included.
        is_satisfied_E: every target token is the most likely one at its position.
        ends_E: the stop rule holds, which ignores additional terms.
    """

    total_E: torch.Tensor
    parts: dict[str, torch.Tensor]
    is_satisfied_E: torch.Tensor
    ends_E: torch.Tensor


class _PairOptimization:
    """Both offsets of every edit of one batch, optimized by Adam.

    Attributes:
        edits: numbers of the running edits, by position in the batch.
    """

    def __init__(self, forward: PairForward, config: PMETConfig, terms: Sequence[Term], max_logits: int) -> None:
        num_edits = len(forward.batch.kl_row_E)
        self.forward, self.config, self.terms, self.max_logits = forward, config, terms, max_logits
        self.values = [_initial_value(forward, edit) for edit in range(num_edits)]
        self.edits = list(range(num_edits))
        first_row_E = torch.stack([(forward.batch.edit_R == edit).nonzero()[0, 0] for edit in range(num_edits)])
        self.state = AdamState.start(forward.activations.site_RD[first_row_E].view(num_edits, 2, -1))
        self.nll_factor_E = torch.full_like(self.state.v0_norm_E[:, 0], config.nll_factor)
        self.mean = label_mean(forward.batch)

    def run(self, progress: Callable[[int], None]) -> list[PairValue]:
        """Optimize until every edit has ended.

        At most ``num_steps`` evaluations, one update fewer.
        """
        for step in range(self.config.num_steps):
            num_running = len(self.edits)
            self._step(step, is_last=step == self.config.num_steps - 1)
            progress(num_running - len(self.edits))
            if not self.edits:
                break
        return self.values

    def _step(self, step: int, *, is_last: bool) -> None:
        """One evaluation; edits that end leave the batch, the others are updated."""
        delta_E2D = self.state.delta_ED.detach().requires_grad_(True)
        total_E, parts, is_satisfied_E, ends_E = self._evaluate(delta_E2D, step)
        read = LateRead(torch.stack([total_E, *parts.values(), ends_E.to(total_E)], 1))
        differentiate: Callable[[], tuple[torch.Tensor, ...]] = functools.partial(
            torch.autograd.grad, total_E.sum(), delta_E2D
        )
        if not is_last:
            differentiate = launch_early(total_E.device, differentiate)
        rows = read.wait()
        for edit, row in zip(self.edits, rows.tolist(), strict=True):
            self.values[edit].losses.append(dict(zip(("loss", *parts), row, strict=False)))
        is_ended_E = rows[:, -1].bool()
        keep_E = torch.zeros_like(is_ended_E) if is_last else ~is_ended_E
        if not keep_E.any():
            self._finish(keep_E, is_ended_E)
            return
        (gradient_E2D,) = differentiate()
        nll_factor = self.config.nll_factor
        # not torch.where of two numbers, which are in torch's default precision
        self.nll_factor_E = torch.full_like(self.nll_factor_E, nll_factor).masked_fill(
            is_satisfied_E, SATISFIED_NLL_SHARE * nll_factor
        )
        if not keep_E.all():
            self._finish(keep_E, is_ended_E)
            gradient_E2D = gradient_E2D[keep_E.to(gradient_E2D.device)]
        self.state.update(gradient_E2D, self.config.lr, self.config.clamp_factor)

    def _evaluate(self, delta_E2D: torch.Tensor, step: int) -> _Evaluation:
        batch, config, state = self.forward.batch, self.config, self.state
        flat_EW = delta_E2D.flatten(1)
        hidden_ND = self.forward.hidden_at_labels(flat_EW)
        losses = vocab_losses(self.forward.lm_head, hidden_ND, batch.label_token_L, state.original, self.max_logits)
        state.original = losses.original  # of the first evaluation, which runs with zero offsets
        # The gradient of the norm at zero is zero, as torch.norm defines it.
        decay_E = (delta_E2D.norm(dim=2) / state.v0_norm_E**2).sum(1)
        parts = {
            "nll": self.nll_factor_E * self.mean(losses.nll_L, flat_EW),
            "kl": config.kl_factor * losses.kl_E.to(flat_EW),
            "weight_decay": config.weight_decay * decay_E,
        }
        total_E = parts["nll"] + parts["kl"] + parts["weight_decay"]
        is_satisfied_E = self._is_satisfied(losses)
        ends_E = total_E.detach() < config.early_stop_loss
        ends_E |= is_satisfied_E & (parts["kl"].detach() <= SATISFIED_KL)
        for term in self.terms:
            parts[term.name] = term.loss(flat_EW, step)
            total_E = total_E + parts[term.name]
        return _Evaluation(total_E, parts, is_satisfied_E, ends_E)

    def _is_satisfied(self, losses: VocabLosses) -> torch.Tensor:
        """Whether every target token of an edit is the most likely one, [E]."""
        batch = self.forward.batch
        is_missed_L = losses.argmax_L != batch.label_token_L.to(losses.argmax_L)
        num_missed_E = torch.zeros_like(self.nll_factor_E).index_add(
            0, batch.edit_R[batch.label_row_L], is_missed_L.to(self.nll_factor_E)
        )
        return num_missed_E == 0

    def _finish(self, keep_E: torch.Tensor, is_ended_E: torch.Tensor) -> None:
        """Write the offsets of edits that are not kept into their values, and drop these edits; masks on the CPU."""
        state = self.state
        for index in (~keep_E).nonzero()[:, 0].tolist():
            value = self.values[self.edits[index]]
            attention_delta_D, delta_D = state.delta_ED[index]
            value.attention_delta_D, value.delta_D = attention_delta_D.clone(), delta_D.clone()
            value.num_updates = state.num_updates
            value.stop_reason = "loss" if is_ended_E[index] else "steps"
            bound = self.config.clamp_factor * state.v0_norm_E[index, 1]
            value.clamped = bool(value.delta_D.norm() >= bound * (1 - 1e-5)) and state.num_updates > 0
        self.edits = [edit for edit, keep in zip(self.edits, keep_E.tolist(), strict=True) if keep]
        if not self.edits:
            return
        keep_E = keep_E.to(state.edits_E.device)
        state.select(keep_E)
        self.nll_factor_E = self.nll_factor_E[keep_E]
        self.forward.select(keep_E)
        for term in self.terms:
            term.select(keep_E)
        self.mean = label_mean(self.forward.batch)


def _initial_value(forward: PairForward, edit: int) -> PairValue:
    """Keys, outputs and v0 of one edit.

    Its first row is the bare prompt, its last one the KL row.
    """
    rows = (forward.batch.edit_R == edit).nonzero()[:-1, 0]
    outputs_ND = forward.activations.outputs_RD[rows]
    return PairValue(
        delta_D=torch.zeros_like(outputs_ND[0]),
        v0_D=outputs_ND[0].clone(),
        keys_NF=forward.activations.keys_RF[rows].clone(),
        outputs_ND=outputs_ND.clone(),
    )
