"""PRUNE: restrain the singular values of the sum of a stream's updates.

"Perturbation-Restrained Sequential Model Editing". With W_0 the weight before the stream, D = U diag(s) V^T the sum of
all updates so far and s_max the largest singular value of W_0,

    W = W_0 + U diag(F(s)) V^T,   F(s) = s below s_max, else log_a(s) - log_a(s_max) + s_max    (or: (s + s_max) / 2).

The published procedure continues to edit the unrestrained weights and restrains once, at the end. Here the weights
after every step of a stream are the result of that procedure for a stream that ends there: a step's delta is the
difference of two restrained sums, the raw updates are stored in ``Delta.stream_state``, and the base editor sees the
unrestrained weights.

F is continuous at s_max with slope 1 / (s_max ln a). Where s_max < 1 / ln a (1 for a = e, 5.5 for a = 1.2), values just
above s_max are therefore enlarged, in the release too; ``safe`` takes min(s, F(s)).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import torch

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.base.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import edited, read_parameter
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.deltas.placement import placed
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.tensor_hash import tensor_digest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.numbers import ABOVE_ONE

log = get_logger(__name__)


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


class PRUNE(PostProcessingEditor[PRUNEConfig]):
    """A base editor's stream with restrained singular values."""

    name = "prune"
    config_class = PRUNEConfig
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "log_base": 1.2,
        "safe": True,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._largest: dict[tuple[str, str], float] = {}

    def compute(self, job: EditJob[PRUNEConfig]) -> list[Delta]:
        # Raw updates are saved with the stream's state, on the CPU.
        raw_history = [placed(job.model, _raw_update(delta)) for delta in job.history]
        to_raw = _difference_of_sums(raw_history, job.history)
        with edited(job.model, to_raw) if job.history else contextlib.nullcontext():
            raw_deltas = self.base_edits(job)
        return [self._restrain_delta(job, raw, raw_history) for raw in raw_deltas]

    @torch.no_grad()
    def _restrain_delta(self, job: EditJob[PRUNEConfig], raw: Delta, raw_history: Sequence[Delta]) -> Delta:
        """The restrained sum with this step minus the one that the weights hold."""
        raw = placed(job.model, raw)
        delta = Delta(
            stream_state={**raw.stream_state, **_stream_state(raw)},
            diagnostics=raw.diagnostics,
            meta=raw.meta,
            intermediates=raw.intermediates,
        )
        reports: dict[str, SingularValueReport] = {}
        steps = [*raw_history, raw]
        for name in raw.weights():
            weight = read_parameter(job.model, name)
            if weight.dim() != 2:
                delta.dense[name] = raw.dense[name]
                continue
            largest = self._largest_original(name, weight, job.history)
            factors = _factors_of(name, steps, job.history, weight)
            if factors is not None:
                module = name.rpartition(".")[0]
                delta.factors[module], reports[name] = _restrain_step(factors, largest, job.config)
            else:
                total = torch.stack([step.weights()[name] for step in steps if name in step.weights()]).sum(0)
                written = [step.weights()[name] for step in job.history if name in step.weights()]
                result, reports[name] = _restrain_dense(total, largest, job.config)
                delta.dense[name] = result - torch.stack(written).sum(0) if written else result
            _warn_if_enlarged(name, reports[name])
        delta.diagnostics["prune"] = reports
        delta.meta[STATE_PREFIX] = {name: report["largest_original"] for name, report in reports.items()}
        delta.diagnostics["update_norm_ratio"] = largest_norm_ratio(job.model, delta)
        return delta

    def _largest_original(self, name: str, weight: torch.Tensor, history: Sequence[Delta]) -> float:
        """Largest singular value of the weight before the stream, computed once."""
        for delta in history:
            if name in delta.meta.get(STATE_PREFIX, {}):
                return float(delta.meta[STATE_PREFIX][name])
        original = weight.detach().double()
        for delta in history:
            if name in delta.weights():
                original = original - delta.weights()[name].to(original)
        identity = (name, tensor_digest(original))
        if identity not in self._largest:
            gram = original @ original.T if original.shape[0] <= original.shape[1] else original.T @ original
            self._largest[identity] = float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())
        return self._largest[identity]


# -- restraining -------------------------------------------------------------------------------------------------------


def _factors_of(
    name: str, steps: Sequence[Delta], history: Sequence[Delta], weight: torch.Tensor
) -> list[Factor] | None:
    """The steps' factors of one weight; ``None`` if the matrix is decomposed.

    That is if a step has a dense update, or the factors' rank exceeds half the smaller width.
    """
    if not all(delta.is_low_rank for delta in (*steps, *history)):
        return None
    module = name.rpartition(".")[0]
    factors = [delta.factors[module] for delta in steps if module in delta.factors]
    rank = sum(factor.left.shape[1] for factor in factors)
    return factors if rank <= min(weight.shape) // 2 else None


def _restrain_step(
    factors: Sequence[Factor], largest: float, config: PRUNEConfig
) -> tuple[Factor, SingularValueReport]:
    """The last step's share of the restrained sum of low-rank updates."""
    result, report = _restrain_factors(factors, largest, config)
    if len(factors) > 1:
        earlier, _ = _restrain_factors(factors[:-1], largest, config)
        left_DR = torch.cat([result.left, -earlier.left], 1)
        result = Factor(left_DR, torch.cat([result.right, earlier.right], 1), result.transposed)
    return result, report


def _restrain_factors(
    factors: Sequence[Factor], largest: float, config: PRUNEConfig
) -> tuple[Factor, SingularValueReport]:
    """F applied to the singular values of a sum of low-rank updates.

    Two thin QR decompositions reduce it to a matrix of the size of the rank.
    """
    left_DR = torch.cat([factor.left for factor in factors], 1)
    right_FR = torch.cat([factor.right for factor in factors], 1)
    q_left, r_left = torch.linalg.qr(left_DR.double())
    q_right, r_right = torch.linalg.qr(right_FR.double())
    u, values, vh = torch.linalg.svd(r_left @ r_right.T)
    result = restrain(values, largest, config)
    factor = Factor((q_left @ (u * result)).to(left_DR), (q_right @ vh.T).to(right_FR), factors[0].transposed)
    return factor, _report(values, result, largest)


def _restrain_dense(
    total: torch.Tensor, largest: float, config: PRUNEConfig
) -> tuple[torch.Tensor, SingularValueReport]:
    u, values, vh = torch.linalg.svd(total.double(), full_matrices=False)
    result = restrain(values, largest, config)
    return ((u * result) @ vh).to(total), _report(values, result, largest)


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


# -- raw updates of a stream -------------------------------------------------------------------------------------------


def _raw_update(delta: Delta) -> Delta:
    """The unrestrained update behind a delta of this editor."""
    raw = Delta()
    for name, tensor in delta.stream_state.items():
        prefix, _, rest = name.partition("/")
        part, _, target = rest.partition("/")
        if prefix == STATE_PREFIX and part == "dense":
            raw.dense[target] = tensor
        elif prefix == STATE_PREFIX and part in ("left", "left_transposed"):
            raw.factors[target] = Factor(tensor, delta.stream_state[f"{STATE_PREFIX}/right/{target}"], part != "left")
    if not raw.dense and not raw.factors:
        raise EditingError("a delta of the history was not made by PRUNE; a stream has one editor throughout.")
    return raw


def _stream_state(raw: Delta) -> dict[str, torch.Tensor]:
    """The tensors that :func:`_raw_update` reads back."""
    if not raw.is_low_rank:
        return {f"{STATE_PREFIX}/dense/{name}": update for name, update in raw.weights().items()}
    stream_state = {}
    for name, factor in raw.factors.items():
        part = "left_transposed" if factor.transposed else "left"
        stream_state[f"{STATE_PREFIX}/{part}/{name}"] = factor.left
        stream_state[f"{STATE_PREFIX}/right/{name}"] = factor.right
    return stream_state


def _difference_of_sums(raw_history: Sequence[Delta], history: Sequence[Delta]) -> Delta:
    """The delta that leads from the restrained weights to the unrestrained ones."""
    total: dict[str, torch.Tensor] = {}
    for sign, deltas in ((1, raw_history), (-1, history)):
        for delta in deltas:
            for name, update in delta.weights().items():
                total[name] = total[name] + sign * update if name in total else sign * update
    return Delta(dense=total)
