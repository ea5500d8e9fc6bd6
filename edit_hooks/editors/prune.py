"""PRUNE: restrain the singular values of all that a stream has written.

Method of "Perturbation-Restrained Sequential Model Editing". With W_0 the weight before the stream, D = U diag(s) V^T
the sum of all updates so far and s_max the largest singular value of W_0,

    W = W_0 + U diag(F(s)) V^T,   F(s) = s below s_max, else log_a(s) - log_a(s_max) + s_max    (or: (s + s_max) / 2).

The published procedure edits on with the unrestrained weights and restrains once, at the end. Here the weights after
every step of a stream are what that procedure gives if the stream ended there: the step's delta is the difference of
two restrained sums, the raw updates travel in ``Delta.stream_state``, and the base editor sees the
unrestrained weights.

F is continuous at s_max and its slope there is 1 / (s_max ln a). Where s_max < 1 / ln a (1 for a = e, 5.5 for a = 1.2)
values just above s_max are therefore enlarged, as the release does too; ``safe`` takes min(s, F(s)).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.base.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import edited, parameter_name
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.fingerprint import tensor_checksum
from edit_hooks.utils.errors import EditingError

log = logging.getLogger(__name__)


CARRY = "prune"


@dataclass(kw_only=True)
class PRUNEConfig(WrapperConfig):
    """How singular values are restrained."""

    function: Literal["log", "linear"] = config_field("F above s_max", default="log")
    log_base: float = config_field("a; the paper tries e, 2, 1.5 and 1.2 (weakest)", default=math.e)
    safe: bool = config_field("never enlarge a singular value: min(s, F(s))", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_base <= 1:
            raise EditingError(f"editor setting 'log_base' is {self.log_base}; it has to be above 1.")


def restrained(values: torch.Tensor, largest: float, config: PRUNEConfig) -> torch.Tensor:
    """F of singular values, given the largest one of the original weight."""
    if config.function == "linear":
        above = (values + largest) / 2
    else:
        above = (values.clamp(min=1e-300).log() - math.log(largest)) / math.log(config.log_base) + largest
    out = torch.where(values >= largest, above, values)
    return torch.minimum(out, values) if config.safe else out


class PRUNE(PostProcessingEditor[PRUNEConfig]):
    """Streams of a base editor with restrained singular values."""

    name = "prune"
    config_class = PRUNEConfig
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "log_base": 1.2,
        "safe": True,
    }

    def __init__(self, overrides: Any = None) -> None:
        super().__init__(overrides)
        self._largest: dict[tuple[str, tuple[int, int]], float] = {}

    def compute(self, job: EditJob[PRUNEConfig]) -> list[Delta]:
        raw_before = [self._raw(delta) for delta in job.history]
        unrestrained = self._correction(raw_before, job.history)
        with edited(job.model, unrestrained) if job.history else contextlib.nullcontext():
            raws = self.base_edits(job)
        return [self._restrain(job.model, raw, raw_before, job.history, job.config) for raw in raws]

    # -- what the stream has written -----------------------------------------------------------------------------------

    def _raw(self, delta: Delta) -> Delta:
        """The unrestrained update behind a delta of ours."""
        raw = Delta()
        for name, tensor in delta.stream_state.items():
            kind, _, rest = name.partition("/")
            part, _, target = rest.partition("/")
            if kind == CARRY and part == "dense":
                raw.dense[target] = tensor
            elif kind == CARRY and part in ("left", "left_transposed"):
                raw.factors[target] = Factor(tensor, delta.stream_state[f"{CARRY}/right/{target}"], part != "left")
        if not raw.dense and not raw.factors:
            raise EditingError("a delta of the history was not made by PRUNE; a stream has one editor throughout.")
        return raw

    @staticmethod
    def _carry(raw: Delta) -> dict[str, torch.Tensor]:
        if not raw.is_low_rank:
            return {f"{CARRY}/dense/{name}": update for name, update in raw.weights().items()}
        stream_state = {}
        for name, factor in raw.factors.items():
            stream_state[f"{CARRY}/{'left_transposed' if factor.transposed else 'left'}/{name}"] = factor.left
            stream_state[f"{CARRY}/right/{name}"] = factor.right
        return stream_state

    @staticmethod
    def _correction(raw_before: Sequence[Delta], history: Sequence[Delta]) -> Delta:
        """What leads from the restrained weights back to the unrestrained ones."""
        total: dict[str, torch.Tensor] = {}
        for sign, deltas in ((1, raw_before), (-1, history)):
            for delta in deltas:
                for name, update in delta.weights().items():
                    total[name] = total[name] + sign * update if name in total else sign * update
        return Delta(dense=total)

    # -- restraining ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _restrain(
        self, model: nn.Module, raw: Delta, raw_before: Sequence[Delta], history: Sequence[Delta], config: PRUNEConfig
    ) -> Delta:
        parameters = dict(model.named_parameters())
        out = Delta(
            stream_state={**raw.stream_state, **self._carry(raw)},
            diagnostics=raw.diagnostics,
            meta=raw.meta,
            intermediates=raw.intermediates,
        )
        facts: dict[str, Any] = {}
        steps = [*raw_before, raw]
        for name in raw.weights():
            weight = parameters[parameter_name(name, parameters)]
            module = name.rpartition(".")[0]
            if weight.dim() != 2:
                out.dense[name] = raw.dense[name]
                continue
            largest = self._largest_original(name, weight, history)
            factors = [delta.factors.get(module) for delta in steps] if raw.is_low_rank else [None]
            rank = sum(factor.left.shape[1] for factor in factors if factor is not None)
            low_rank = all(d.is_low_rank for d in (*steps, *history)) and rank <= min(weight.shape) // 2
            if low_rank:
                before = [factor for factor in factors[:-1] if factor is not None]
                assert factors[-1] is not None
                now, facts[name] = _restrained_factor([*before, factors[-1]], largest, config)
                if before:
                    earlier, _ = _restrained_factor(before, largest, config)
                    now = _difference(now, earlier)
                out.factors[module] = now
            else:
                total = torch.stack([delta.weights()[name] for delta in steps if name in delta.weights()]).sum(0)
                written = [delta.weights()[name] for delta in history if name in delta.weights()]
                now_dense, facts[name] = _restrained_dense(total, largest, config)
                out.dense[name] = now_dense - torch.stack(written).sum(0) if written else now_dense
            _warn_if_enlarged(name, facts[name])
        out.diagnostics["prune"] = facts
        out.meta[CARRY] = {name: record["largest_original"] for name, record in facts.items()}
        out.diagnostics["update_norm_ratio"] = largest_norm_ratio(model, out)
        return out

    def _largest_original(self, name: str, weight: torch.Tensor, history: Sequence[Delta]) -> float:
        """Largest singular value of the weight before the stream; computed once per weight."""
        for delta in history:
            if name in delta.meta.get(CARRY, {}):
                return delta.meta[CARRY][name]
        original = weight.detach().double()
        for delta in history:
            if name in delta.weights():
                original = original - delta.weights()[name].to(original)
        identity = (name, tensor_checksum(original))
        if identity not in self._largest:
            gram = original @ original.T if original.shape[0] <= original.shape[1] else original.T @ original
            self._largest[identity] = float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())
        return self._largest[identity]


def _restrained_factor(factors: Sequence[Factor], largest: float, config: PRUNEConfig) -> tuple[Factor, dict[str, Any]]:
    """F applied to the singular values of a sum of low-rank updates, through two thin QRs."""
    left_DR = torch.cat([factor.left for factor in factors], 1)
    right_FR = torch.cat([factor.right for factor in factors], 1)
    q_left, r_left = torch.linalg.qr(left_DR.double())
    q_right, r_right = torch.linalg.qr(right_FR.double())
    u, values, vh = torch.linalg.svd(r_left @ r_right.T)
    out = restrained(values, largest, config)
    new = Factor((q_left @ (u * out)).to(left_DR), (q_right @ vh.T).to(right_FR), factors[0].transposed)
    return new, _facts(values, out, largest)


def _restrained_dense(total: torch.Tensor, largest: float, config: PRUNEConfig) -> tuple[torch.Tensor, dict[str, Any]]:
    u, values, vh = torch.linalg.svd(total.double(), full_matrices=False)
    out = restrained(values, largest, config)
    return ((u * out) @ vh).to(total), _facts(values, out, largest)


def _difference(now: Factor, earlier: Factor) -> Factor:
    return Factor(torch.cat([now.left, -earlier.left], 1), torch.cat([now.right, earlier.right], 1), now.transposed)


def _facts(values: torch.Tensor, out: torch.Tensor, largest: float) -> dict[str, Any]:
    return {
        "largest_original": largest,
        "largest_before": float(values.max()),
        "largest_after": float(out.max()),
        "num_restrained": int((values >= largest).sum()),
        "num_enlarged": int((out > values * (1 + 1e-9)).sum()),
    }


def _warn_if_enlarged(name: str, facts: dict[str, Any]) -> None:
    if facts["num_enlarged"]:
        log.warning(
            "%s: %d singular values of the update are enlarged, because the largest of the original weight, %.3g, is "
            "small for this log_base; safe=true takes min(s, F(s)).",
            name,
            facts["num_enlarged"],
            facts["largest_original"],
        )
