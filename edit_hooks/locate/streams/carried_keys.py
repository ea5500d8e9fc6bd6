"""The keys of the earlier steps of a stream, and the solves that protect them.

Up to f / 2 keys are kept as they are, and an update is solved over all of them. Beyond, they are in a factor of the
system (:class:`~edit_hooks.locate.streams.key_factor.KeyFactor`), so that memory and time per step stay constant.

Shapes: E requests of a call, U requests of one delta, P past keys, f key width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.moments.solve import KeyMetric, ridge_keys
from edit_hooks.locate.streams.key_factor import KeyFactor
from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.hashing import key_of

RidgeOf = Callable[[torch.Tensor], float]  # keys of one delta [U, f] -> ridge
FACTS = "facts"  # in Delta.meta: the facts whose keys are carried
KEYS_AT_ONCE = 2**13  # that are protected together, in float64


def key_name(layer: int) -> str:
    """Name of a layer's keys in ``Delta.stream_state``."""
    return f"keys.layer{layer}"


def factor_name(layer: int) -> str:
    """Name of a layer's factor in ``Delta.stream_state``."""
    return f"key_factor.layer{layer}"


def ridge_name(layer: int) -> str:
    """Name of the ridge in a layer's factor in ``Delta.stream_state``."""
    return f"key_ridge.layer{layer}"


def fact_of(request: EditRequest) -> str:
    """Identity of a fact, the same for edits of it with other targets: prompt, in its context, and subject."""
    return key_of([request.text, request.subject_span])[:16]


@dataclass(frozen=True, eq=False)
class CarriedKeys:
    """The past keys of one layer: all of them, or a factor of the system that they are in.

    Attributes:
        keys_FP: past keys as columns, [f, P], as the steps stored them; none beside a factor.
    """

    keys_FP: torch.Tensor
    factor: KeyFactor | None = None

    @classmethod
    def after(
        cls, history: Sequence[Delta], layer: int, width: int, metric: KeyMetric, ridge_of: RidgeOf
    ) -> CarriedKeys:
        """The keys after some steps; the steps before one with a factor are in that factor."""
        keys: list[torch.Tensor] = []
        factor: KeyFactor | None = None
        for delta in history:
            state = delta.stream_state
            if factor_name(layer) in state:
                keys, factor = [], KeyFactor(state[factor_name(layer)], float(state[ridge_name(layer)]))
            if key_name(layer) not in state:
                continue
            keys.append(state[key_name(layer)])
            if factor is None and sum(part.shape[1] for part in keys) > width // 2:
                ridge = ridge_of(keys[-1].T.double())
                factor = KeyFactor.start(metric, ridge, width)
            if factor is not None:
                factor, keys = factor.add(metric.coordinates(torch.cat(keys, 1).T.double())), []
        return cls(torch.cat(keys, 1) if keys else torch.zeros(width, 0), factor)

    @classmethod
    def protecting(cls, keys_PF: torch.Tensor, metric: KeyMetric, ridge: float) -> CarriedKeys:
        """Given keys; from f / 2 of them on in a factor, if the metric allows one.

        Of keys in less than float64 only :data:`KEYS_AT_ONCE` are raised to it at a time.
        """
        width = keys_PF.shape[1]
        factor = KeyFactor.start(metric, ridge, width) if len(keys_PF) > width // 2 else None
        if factor is None:
            return cls(keys_PF.double().T)
        for part_UF in keys_PF.split(KEYS_AT_ONCE):
            factor = factor.add(metric.coordinates(part_UF.double()))
        return cls(torch.zeros(width, 0), factor)

    def state(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors that :meth:`after` reads back."""
        state = {key_name(layer): self.keys_FP} if self.keys_FP.shape[1] else {}
        if self.factor is not None:
            state[factor_name(layer)] = self.factor.factor_FF
            state[ridge_name(layer)] = torch.tensor(self.factor.ridge, dtype=torch.float64)
        return state


class KeySystem:
    """Right factors of the updates of one layer, which protect the past keys.

    Args:
        keys_EF: new keys of all requests, float64.
    """

    def __init__(self, metric: KeyMetric, past: CarriedKeys, keys_EF: torch.Tensor) -> None:
        self._metric, self._keys_EF, self._factor = metric, keys_EF, past.factor
        if past.factor is None:
            self._past_PF = past.keys_FP.T.to(keys_EF)
            products = metric.metric_product(torch.cat([self._past_PF, keys_EF]))
            self._past_products_PF, self._products_EF = products.tensor_split([len(self._past_PF)])
        else:
            self._coordinates_EF = metric.coordinates(keys_EF)

    def right_factors(self, group: Sequence[int], ridge: float) -> torch.Tensor:
        """The rows of A^-1 K that belong to the new keys of a group, [U, f]; past keys have a residual of zero."""
        group = list(group)
        if self._factor is None:
            everything = torch.cat([self._past_PF, self._keys_EF[group]])
            products = torch.cat([self._past_products_PF, self._products_EF[group]])
            return ridge_keys(everything, products, ridge)[len(self._past_PF) :]
        factor = self._factor.with_ridge(self._metric, ridge)
        keys_UF = self._coordinates_EF[group]
        return factor.right_factors(keys_UF, factor.products(keys_UF))
