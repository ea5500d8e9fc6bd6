"""PMET: MEMIT with a second, discarded offset at the attention output ("PMET: Precise Model Editing in a Transformer").

Two offsets are optimized together at the fact token of the last edited block L, one at the output of the attention
projection and one at that of the MLP projection. What the attention learns meanwhile is general and need not be
stored, so only the MLP's target z = v0 + delta is written. Both have their own weight decay and ball; the loss is

    nll_factor * NLL + kl_factor * KL + weight_decay * (||delta_a|| / ||v0_a||^2 + ||delta_m|| / ||v0_m||^2)

and, as in the release, when every target token is the most likely one at its place, the NLL counts a tenth in the next
evaluation, and the run ends if the KL part is at most 0.01 (it also ends below ``early_stop_loss``).

Then the layers as in MEMIT, but residuals are those of the MLP projection's output at block L, spread by square roots:

    R = (Z - V_L) / sqrt(n - i),   W <- W + R K^T (lambda C + K K^T)^-1.

Where a norm stands behind the MLP (Gemma, OLMo 2), ``residual_mode: normalized`` measures n(z) - n(V_L), what block L's
MLP should add to the residual stream and what it adds, and each layer takes the MLP output whose norm is nearest to its
share of that (:mod:`edit_hooks.locate.post_norm`); ``faithful`` is the release's arithmetic.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.editors.memit import MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.locate.reference_forward import ReferenceForward
from edit_hooks.locate.suffix_forward import CachedModule, RowGroup, SuffixForward, add_at_first
from edit_hooks.locate.value_batch import Batch, ReadActivations, Site, SiteActivations, ValueProblem
from edit_hooks.locate.value_optimization import (
    ADAM_BETAS,
    ADAM_EPS,
    OptimizedValue,
    Term,
    ValueLimits,
    mean_over_labels,
    split_problems,
)
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.hooks import frozen, hooks, on_output, record_at
from edit_hooks.modeling.vocab_loss import OriginalLogits, vocab_losses
from edit_hooks.utils.errors import EditingError

SATISFIED_NLL_SHARE, SATISFIED_KL = 0.1, 0.01


@dataclass(kw_only=True)
class PMETConfig(MEMITConfig):
    """MEMIT's settings with the release's values for GPT-J."""

    num_steps: int = config_field("loss evaluations of the value optimization; one update fewer is made", default=30)
    lr: float = config_field("Adam learning rate of the offsets", default=0.2)
    kl_factor: float = config_field("factor of the KL term at the subject", default=1.0)
    nll_factor: float = config_field("factor of the target's negative log-likelihood", default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nll_factor <= 0:
            raise EditingError(f"editor setting 'nll_factor' is {self.nll_factor}; a positive number is needed.")


@dataclass
class PairValue(OptimizedValue):
    """A value whose offset at the attention output was optimized too and is not written."""

    attention_delta_D: torch.Tensor | None = None


class PMET(ResidualSpreadingEditor[PMETConfig]):
    """MEMIT's layers with PMET's targets, residuals and spreading."""

    name = "pmet"
    config_class = PMETConfig
    config_folders = ("pmet",)
    measures_output = True
    # At the last token: half of what is optimized at the subject's belongs to the attention and is not written.
    contract_settings: ClassVar[Mapping[str, Any]] = {**MEMIT_CONTRACT_SETTINGS, "fact_token": "last"}

    def divisor(self, layers_left: int) -> float:
        return layers_left**0.5

    def optimize(
        self, job: EditJob[PMETConfig], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        config, model = job.config, job.model
        layer = config.edited_layers[-1]
        plain = config.engine == "reference"

        def make_forward(batch: Batch) -> PairSuffix | PairReference:
            return (PairReference if plain else PairSuffix)(model, batch, layer, "mlp")

        terms = self.terms(job, make_forward)
        limits = ValueLimits.for_device(model)
        if plain:
            limits = dataclasses.replace(limits, max_edits=1)
        values: list[OptimizedValue | None] = [None] * len(problems)
        with frozen(model):
            for chunk in split_problems(problems, limits):
                forward = make_forward(Batch.of([problems[index] for index in chunk], input_device(model)))
                more = terms(chunk) if terms is not None else ()
                solved = _solve(forward, len(chunk), config, limits.max_logits, more, job.progress)
                for index, value in zip(chunk, solved, strict=True):
                    values[index] = value
        return values  # type: ignore[return-value]


class PairSuffix(SuffixForward):
    """The fast path with offsets at the attention and at the MLP projection of one block, side by side [E, 2 d].

    The block's attention is kept like the blocks below; its MLP sees the attention's offset, so it runs in every step.
    """

    def _cached_modules(self) -> list[CachedModule]:
        attention, _, *below = super()._cached_modules()
        return [dataclasses.replace(attention, takes_offset=True), *below]

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        return _pair_recorded(super()._recording(column_R), self, column_R)

    @contextlib.contextmanager
    def _offsets_added(self, group: RowGroup, offset_GD: torch.Tensor) -> Iterator[None]:
        attention_GD, mlp_GD = offset_GD.chunk(2, dim=1)
        rewrite = self.model.get_submodule(self.arch.rewrite_name(self.layer))
        at_mlp = on_output(rewrite, lambda hidden: add_at_first(hidden, mlp_GD))
        with super()._offsets_added(group, attention_GD), hooks(at_mlp):
            yield


class PairReference(ReferenceForward):
    """The plain path with offsets at the attention and at the MLP projection of one block, side by side [E, 2 d]."""

    def _recording(self, column_R: torch.Tensor) -> contextlib.AbstractContextManager[ReadActivations]:
        return _pair_recorded(super()._recording(column_R), self, column_R)

    def _adding(self, delta_ED: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        names = (self.arch.attention_out.format(self.layer), self.arch.rewrite_name(self.layer))
        both = zip(names, delta_ED.chunk(2, dim=1), strict=True)
        return hooks(*(on_output(self.model.get_submodule(name), self._plus(offset)) for name, offset in both))


@contextlib.contextmanager
def _pair_recorded(
    inner: contextlib.AbstractContextManager[ReadActivations],
    forward: PairSuffix | PairReference,
    column_R: torch.Tensor,
) -> Iterator[ReadActivations]:
    """What the other forward passes record, with the outputs of both projections [R, 2 d] as the site."""
    attention = forward.model.get_submodule(forward.arch.attention_out.format(forward.layer))
    records: dict[str, torch.Tensor] = {}

    def both() -> SiteActivations:
        activations = read()
        attention_RD = records["attention"].to(activations.outputs_RD.device)
        return dataclasses.replace(activations, site_RD=torch.cat([attention_RD, activations.outputs_RD], 1))

    with inner as read, hooks(on_output(attention, record_at(records, "attention", column_R))):
        yield both


def _solve(
    forward: PairSuffix | PairReference,
    num_edits: int,
    config: PMETConfig,
    max_logits: int,
    terms: Sequence[Term],
    progress: Callable[[int], None],
) -> list[OptimizedValue]:
    """Both offsets of every edit. Halves of offsets [E, 2, d] are the attention's and the MLP's."""
    values = [_initial(forward, edit) for edit in range(num_edits)]
    first_row_E = torch.stack([(forward.batch.edit_R == edit).nonzero()[0, 0] for edit in range(num_edits)])
    v0_norm_E2 = forward.activations.site_RD[first_row_E].view(num_edits, 2, -1).norm(dim=2)
    delta_E2D = torch.zeros(num_edits, 2, forward.activations.outputs_RD.shape[1]).to(v0_norm_E2)
    first_E2D, second_E2D = torch.zeros_like(delta_E2D), torch.zeros_like(delta_E2D)
    edits_E = torch.arange(num_edits, device=delta_E2D.device)
    nll_factor_E = torch.full_like(v0_norm_E2[:, 0], config.nll_factor)
    original: OriginalLogits | None = None
    for step in range(config.num_steps):
        delta_E2D = delta_E2D.detach().requires_grad_(True)
        flat_EW = delta_E2D.flatten(1)
        batch = forward.batch
        hidden_ND = forward.hidden_at_labels(flat_EW)
        found = vocab_losses(forward.lm_head, hidden_ND, batch.label_token_L, original, max_logits)
        original = found.original  # of the first evaluation
        nll_E, kl_E = mean_over_labels(batch, found.nll_L, flat_EW), found.kl_E.to(flat_EW)
        missed_E = torch.zeros_like(nll_factor_E).index_add(
            0,
            batch.edit_R[batch.label_row_L],
            (found.argmax_L != batch.label_token_L.to(found.argmax_L)).to(nll_factor_E),
        )
        satisfied_E = missed_E == 0  # every target token is the most likely one
        # The norm's gradient at zero is taken as zero, as torch.norm does.
        decay_E = (delta_E2D.norm(dim=2) / v0_norm_E2**2).sum(1)
        parts = {
            "nll": nll_factor_E * nll_E,
            "kl": config.kl_factor * kl_E,
            "weight_decay": config.weight_decay * decay_E,
        }
        total_E = parts["nll"] + parts["kl"] + parts["weight_decay"]
        reached_E = total_E.detach() < config.early_stop_loss
        reached_E |= satisfied_E & (parts["kl"].detach() <= SATISFIED_KL)
        for term in terms:
            parts[term.name] = term.loss(flat_EW, step)
            total_E = total_E + parts[term.name]
        for edit, *row in zip(edits_E.tolist(), total_E.tolist(), *(p.tolist() for p in parts.values()), strict=True):
            values[edit].losses.append(dict(zip(("loss", *parts), row, strict=True)))
        done_E = reached_E | (step == config.num_steps - 1)
        for index in done_E.nonzero()[:, 0].tolist():
            bound_2 = config.clamp_factor * v0_norm_E2[index]
            _finish(values[int(edits_E[index])], delta_E2D.detach()[index], bound_2, step, bool(reached_E[index]))
        progress(int(done_E.sum()))
        if done_E.all():
            break
        (gradient_E2D,) = torch.autograd.grad(total_E[~done_E].sum(), delta_E2D)
        # Only the edits still running, from here on.
        nll_factor_E = torch.where(satisfied_E, SATISFIED_NLL_SHARE * config.nll_factor, config.nll_factor)[~done_E]
        gradient_E2D, delta_E2D = gradient_E2D[~done_E], delta_E2D.detach()[~done_E]
        first_E2D, second_E2D, original = first_E2D[~done_E], second_E2D[~done_E], original.select(~done_E)
        edits_E, v0_norm_E2 = edits_E[~done_E], v0_norm_E2[~done_E]
        if done_E.any():
            forward.select(~done_E)
            for term in terms:
                term.select(~done_E)
        beta1, beta2 = ADAM_BETAS
        first_E2D = beta1 * first_E2D + (1 - beta1) * gradient_E2D
        second_E2D = beta2 * second_E2D + (1 - beta2) * gradient_E2D.square()
        denominator_E2D = (second_E2D / (1 - beta2 ** (step + 1))).sqrt() + ADAM_EPS
        delta_E2D = delta_E2D - config.lr * first_E2D / (1 - beta1 ** (step + 1)) / denominator_E2D
        bound_E2 = config.clamp_factor * v0_norm_E2
        delta_E2D = delta_E2D * (bound_E2 / delta_E2D.norm(dim=2).clamp(min=1e-30)).clamp(max=1)[..., None]
    return list(values)


def _initial(forward: PairSuffix | PairReference, edit: int) -> PairValue:
    """Keys, outputs and v0 of one edit; its first row is the bare prompt, its last one the KL row."""
    rows = (forward.batch.edit_R == edit).nonzero()[:-1, 0]
    outputs_ND = forward.activations.outputs_RD[rows]
    return PairValue(
        delta_D=torch.zeros_like(outputs_ND[0]),
        v0_D=outputs_ND[0].clone(),
        keys_NF=forward.activations.keys_RF[rows].clone(),
        outputs_ND=outputs_ND.clone(),
    )


def _finish(value: PairValue, delta_2D: torch.Tensor, bound_2: torch.Tensor, step: int, reached: bool) -> None:
    value.attention_delta_D, value.delta_D = delta_2D[0].clone(), delta_2D[1].clone()
    value.num_updates = step
    value.stop_reason = "loss" if reached else "steps"
    value.clamped = bool(value.delta_D.norm() >= bound_2[1] * (1 - 1e-5)) and step > 0
