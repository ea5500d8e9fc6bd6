"""PRUNE: restrain the singular values of the sum of a stream's updates.

"Perturbation-Restrained Sequential Model Editing". With W_0 the weight before the stream, D = U diag(s) V^T the sum of
all updates so far and s_max the largest singular value of W_0,

    W = W_0 + U diag(F(s)) V^T,   F(s) = s below s_max, else log_a(s) - log_a(s_max) + s_max    (or: (s + s_max) / 2).

The published procedure continues to edit the unrestrained weights and restrains once, at the end. Here the weights
after every step of a stream are the result of that procedure for a stream that ends there, the raw updates are stored
in ``Delta.stream_state``, and the base editor sees the unrestrained weights. With the excess of a sum D,

    G(D) = U diag(F(s) - s) V^T,   whose rank is the number of singular values that F changes,

a step's delta is its raw update + G(sum with it) - G(sum before it). As a difference of two restrained sums it would
have the rank of both, so that a stream of N edits would take N^2 columns. Past deltas are not read.

``aligned`` is the form of OTE-SE: each update is restrained by itself, together with what earlier steps left out
(:mod:`edit_hooks.base.wrapping.error_feedback`).

F is continuous at s_max with slope 1 / (s_max ln a). Where s_max < 1 / ln a (1 for a = e, 5.5 for a = 1.2), values just
above s_max are therefore enlarged, in the release too; ``safe`` takes min(s, F(s)).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import nn

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.base.wrapping.error_feedback import (
    Remainder,
    condense_aligned,
    raw_state,
    raw_update,
    require_exact_base,
    with_raw_updates,
    with_remainder,
)
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import edited, read_parameter
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.deltas.placement import beside_weights, on_cpu, placed
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import ABOVE_ONE
from edit_hooks.utils.storage.hashing import key_of

log = get_logger(__name__)


Update = Factor | torch.Tensor  # of one weight

STATE_PREFIX = "prune"  # of the raw updates in saved edits, and of their report


@dataclass(kw_only=True)
class PRUNEConfig(WrapperConfig):
    """Settings of the restraint."""

    function: Literal["log", "linear"] = config_field(
        "F above s_max, the largest singular value of the weight", default="log"
    )
    log_base: float = config_field(
        "a, the base of function=log; the paper tries e, 2, 1.5 and 1.2 (weakest)", within=ABOVE_ONE, default=math.e
    )
    safe: bool = config_field("never enlarge a singular value: min(s, F(s))", default=False)
    aligned: bool = config_field(
        "in a stream, restrain each update with what earlier steps left out added to it, in place of the sum of all; "
        "needs stream=exact in base_settings",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aligned:
            require_exact_base(self)


def restrain(values: torch.Tensor, largest: float, config: PRUNEConfig) -> torch.Tensor:
    """F of singular values.

    Args:
        largest: s_max, the largest singular value of the original weight.
    """
    if config.function == "linear":
        above = (values + largest) / 2
    else:
        above = (values.clamp(min=1e-300).log() - math.log(largest)) / math.log(config.log_base) + largest
    result = torch.where(values >= largest, above, values)
    return torch.minimum(result, values) if config.safe else result


class SingularValueReport(TypedDict):
    """Diagnostics of one matrix.

    ``largest_*`` are singular values of the original weight and of the summed update.
    """

    largest_original: float
    largest_before: float
    largest_after: float
    num_restrained: int
    num_enlarged: int


class RestrainedUpdate(NamedTuple):
    """A sum of updates of one weight, restrained.

    Attributes:
        excess: G of the sum; ``None`` if F changes nothing.
        rank: the largest rank that the sum can have.
    """

    excess: Update | None
    report: SingularValueReport
    rank: int


class PRUNE(PostProcessingEditor[PRUNEConfig]):
    """A base editor's stream with restrained singular values."""

    name = "prune"
    config_class = PRUNEConfig
    stream_growth = StreamGrowth("the raw update of each step: f + d numbers per edit and layer", "with edits")
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "log_base": 1.2,
        "safe": True,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self.reads_past_updates = self.base.reads_past_updates
        self._largest: dict[tuple[str, str], float] = {}
        self._last_dense: dict[
            str, tuple[str, RestrainedUpdate]
        ] = {}  # by parameter: key of a dense sum, its restraint

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        if not self._resolved[unwrapped(model)].aligned:
            return super().condensed(model, history)
        condensed = condense_aligned(self.base, model, history, STATE_PREFIX)
        for delta in condensed:  # the original singular values
            delta.meta[STATE_PREFIX] = {k: v for step in history for k, v in step.meta.get(STATE_PREFIX, {}).items()}
        return condensed

    def most_state_bytes(self, model: nn.Module) -> int | None:
        return None  # the raw updates of all steps

    def compute(self, job: EditJob[PRUNEConfig]) -> list[Delta]:
        if job.config.aligned:
            return self._aligned(job)
        # Raw updates are saved with the stream's state, on the CPU; dense ones are moved one at a time.
        past = [_raw_update(delta) for delta in job.history]
        past = [placed(job.model, raw) if raw.is_low_rank else raw for raw in past]
        before = {name: self._restrained_sum(job, name, past) for name in _matrices(past)}
        to_raw = Delta()
        for name, restrained in before.items():
            _add(to_raw, name, [_negative(restrained.excess)])
        with edited(job.model, to_raw) if to_raw.writes else contextlib.nullcontext():
            raw_deltas = self.base_edits(job, with_raw_updates(job.history, STATE_PREFIX))
        return [self._restrain_delta(job, raw, past, before) for raw in raw_deltas]

    @torch.no_grad()
    def _aligned(self, job: EditJob[PRUNEConfig]) -> list[Delta]:
        """Updates with the remainder of the earlier steps, each restrained by itself."""
        remainder = Remainder(STATE_PREFIX).after(job.model, job.history)
        with remainder.added(job.model):
            raws = self.base_edits(job, with_raw_updates(job.history, STATE_PREFIX))
        deltas = [with_remainder(job.model, raw, remainder) for raw in raws]
        for delta in deltas:
            reports: dict[str, SingularValueReport] = {}
            for name, update in delta.dense.items():
                largest = self._largest_original(name, read_parameter(job.model, name), job.history)
                excess, reports[name] = _restrain_dense(update, largest, job.config)
                delta.dense[name] = (update + excess).cpu()
                _warn_if_enlarged(name, reports[name])
            delta.diagnostics |= {"prune": reports, "update_norm_ratio": largest_norm_ratio(job.model, delta)}
            delta.meta[STATE_PREFIX] = {name: report["largest_original"] for name, report in reports.items()}
        return deltas

    @torch.no_grad()
    def _restrain_delta(
        self, job: EditJob[PRUNEConfig], raw: Delta, past: Sequence[Delta], before: Mapping[str, RestrainedUpdate]
    ) -> Delta:
        """The restrained sum with this step minus the one that the weights hold."""
        raw = placed(job.model, raw)
        delta = Delta(
            stream_state={**raw.stream_state, **raw_state(raw, STATE_PREFIX)},
            warnings=raw.warnings,
            diagnostics=raw.diagnostics,
            meta=raw.meta,
            intermediates=raw.intermediates,
        )
        reports: dict[str, SingularValueReport] = {}
        matrices = _matrices([raw])
        for name in raw.parameter_names:
            if name not in matrices:
                delta.dense[name] = raw.dense[name]
                continue
            after = self._restrained_sum(job, name, [*past, raw])
            reports[name] = after.report
            excess_before = before[name].excess if name in before else None
            _add(delta, name, [_update_of(raw, name), after.excess, _negative(excess_before)], after.rank)
            _warn_if_enlarged(name, reports[name])
        delta.diagnostics["prune"] = reports
        delta.meta[STATE_PREFIX] = {name: report["largest_original"] for name, report in reports.items()}
        delta.diagnostics["update_norm_ratio"] = largest_norm_ratio(job.model, delta)
        delta.dense = on_cpu(delta.dense)  # as large as their weights, and many may wait to be stored
        return delta

    @torch.no_grad()
    def _restrained_sum(self, job: EditJob[PRUNEConfig], name: str, steps: Sequence[Delta]) -> RestrainedUpdate:
        """G of the sum of raw updates of one weight."""
        weight = read_parameter(job.model, name)
        largest = self._largest_original(name, weight, job.history)
        factor = _low_rank_sum(name, steps, weight)
        if factor is not None:
            return _restrain_factor(factor, largest, job.config)
        total = _dense_sum(job.model, name, steps)
        # The sum after a step is the one before the next, and its decomposition is most of the work.
        key = key_of([tensor_digest(total), largest, job.config.function, job.config.log_base, job.config.safe])
        if name not in self._last_dense or self._last_dense[name][0] != key:
            excess, report = _restrain_dense(total, largest, job.config)
            self._last_dense[name] = key, RestrainedUpdate(excess.cpu(), report, min(weight.shape))
        restrained = self._last_dense[name][1]
        assert isinstance(restrained.excess, torch.Tensor)
        return restrained._replace(excess=restrained.excess.to(weight.device))

    def _largest_original(self, name: str, weight: torch.Tensor, history: Sequence[Delta]) -> float:
        """Largest singular value of the weight before the stream, computed once."""
        for delta in history:
            if name in delta.meta.get(STATE_PREFIX, {}):
                return float(delta.meta[STATE_PREFIX][name])
        original = weight.detach().double()  # no step of the stream has changed it
        identity = (name, tensor_digest(original))
        if identity not in self._largest:
            gram = original @ original.T if original.shape[0] <= original.shape[1] else original.T @ original
            self._largest[identity] = float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())
        return self._largest[identity]


# -- sums of raw updates -----------------------------------------------------------------------------------------------


def _matrices(steps: Sequence[Delta]) -> list[str]:
    """Names of the changed parameters that are matrices."""
    return list(
        dict.fromkeys(
            name
            for step in steps
            for name in step.parameter_names
            if name not in step.dense or step.dense[name].dim() == 2
        )
    )


def _update_of(step: Delta, name: str) -> Update | None:
    """A step's update of one parameter, as a factor if the step is of low rank."""
    if name not in step.parameter_names:
        return None
    return step.factors[name.removesuffix(".weight")] if step.is_low_rank else step.weight(name)


def _low_rank_sum(name: str, steps: Sequence[Delta], weight: torch.Tensor) -> Factor | None:
    """The sum as one factor; ``None`` if the matrix is decomposed.

    That is if a step has a dense update, or the factors' rank exceeds half the smaller width.
    """
    if not all(step.is_low_rank for step in steps):
        return None
    joined = _joined(
        [step.factors[module] for step in steps if (module := name.removesuffix(".weight")) in step.factors]
    )
    return joined if joined.left.shape[1] <= min(weight.shape) // 2 else None


def _dense_sum(model: nn.Module, name: str, steps: Sequence[Delta]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for step in steps:
        update = _update_of(step, name)
        if update is None:
            continue
        if isinstance(update, Factor):
            alone = Delta(factors={name.removesuffix(".weight"): update})
        else:
            alone = Delta(dense={name: update})
        dense = beside_weights(model, alone).weight(name)
        total = dense if total is None else total + dense
    assert total is not None, f"no step changes {name}"
    return total


def _joined(factors: Sequence[Factor]) -> Factor:
    """The sum of factors; their ranks add up."""
    left_DR = torch.cat([factor.left for factor in factors], 1)
    return Factor(left_DR, torch.cat([factor.right for factor in factors], 1), factors[0].transposed)


def _negative(update: Update | None) -> Update | None:
    if isinstance(update, Factor):
        return update._replace(left=-update.left)
    return None if update is None else -update


def _add(delta: Delta, name: str, updates: Sequence[Update | None], most: int | None = None) -> None:
    """Write the sum of updates of one matrix into a delta, as a factor if all are factors.

    Args:
        most: the rank that the sum has at most, to which a longer factor is shortened.
    """
    parts = [update for update in updates if update is not None]
    factors = [part for part in parts if isinstance(part, Factor)]
    if len(factors) < len(parts):
        dense = [part.update() if isinstance(part, Factor) else part for part in parts]
        delta.dense[name] = functools.reduce(torch.add, dense)
    elif factors:
        factor = _joined(factors)
        if most is not None and factor.left.shape[1] > most:
            factor = _shortened(factor, most)
        delta.factors[name.removesuffix(".weight")] = factor


# -- restraining -------------------------------------------------------------------------------------------------------


class _Decomposition(NamedTuple):
    """Singular value decomposition of a factor's update, float64, [D, R], [R], [F, R]."""

    u_DR: torch.Tensor
    values_R: torch.Tensor
    v_FR: torch.Tensor

    @classmethod
    def of(cls, factor: Factor) -> _Decomposition:
        """Two thin QR decompositions reduce it to a matrix of the size of the rank."""
        q_left, r_left = torch.linalg.qr(factor.left.double())
        q_right, r_right = torch.linalg.qr(factor.right.double())
        u, values, vh = torch.linalg.svd(r_left @ r_right.T)
        return cls(q_left @ u, values, q_right @ vh.T)


def _shortened(factor: Factor, rank: int) -> Factor:
    """An update whose rank is at most ``rank``, with as many columns."""
    u_DR, values_R, v_FR = _Decomposition.of(factor)
    left_DK = (u_DR * values_R)[:, :rank].to(factor.left)
    return Factor(left_DK, v_FR[:, :rank].to(factor.right), factor.transposed)


def _restrain_factor(factor: Factor, largest: float, config: PRUNEConfig) -> RestrainedUpdate:
    """G of a sum of low rank: the singular vectors whose values F changes."""
    u_DR, values_R, v_FR = _Decomposition.of(factor)
    result_R = restrain(values_R, largest, config)
    excess_R = result_R - values_R
    is_changed_R = excess_R != 0
    excess = None
    if is_changed_R.any():
        left_DK = (u_DR * excess_R)[:, is_changed_R].to(factor.left)
        excess = Factor(left_DK, v_FR[:, is_changed_R].to(factor.right), factor.transposed)
    return RestrainedUpdate(excess, _report(values_R, result_R, largest), factor.left.shape[1])


def _restrain_dense(
    total: torch.Tensor, largest: float, config: PRUNEConfig
) -> tuple[torch.Tensor, SingularValueReport]:
    u, values, vh = torch.linalg.svd(total.double(), full_matrices=False)
    result = restrain(values, largest, config)
    return ((u * (result - values)) @ vh).to(total), _report(values, result, largest)


def _report(values: torch.Tensor, result: torch.Tensor, largest: float) -> SingularValueReport:
    return {
        "largest_original": largest,
        "largest_before": float(values.max()),
        "largest_after": float(result.max()),
        "num_restrained": int((values >= largest).sum()),
        "num_enlarged": int((result > values * (1 + 1e-9)).sum()),
    }


def _warn_if_enlarged(name: str, report: SingularValueReport) -> None:
    if report["num_enlarged"]:
        log.warning(
            "%s: %d singular values of the update are enlarged, because the largest of the original weight, %.3g, is "
            "small for this log_base; safe=true takes min(s, F(s)).",
            name,
            report["num_enlarged"],
            report["largest_original"],
        )


def _raw_update(delta: Delta) -> Delta:
    """The unrestrained update behind a delta of this editor."""
    raw = raw_update(delta, STATE_PREFIX)
    if not raw.dense and not raw.factors:
        raise EditingError("a delta of the history was not made by PRUNE; a stream has one editor throughout.")
    return raw
