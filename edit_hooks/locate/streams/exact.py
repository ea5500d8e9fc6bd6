"""Streams that leave the weights of one joint edit of all facts so far, with corrections and deletions.

One matrix W_0 is edited. Step t brings keys K and residuals R^0, both read on the unedited weights. With the past keys
in A = ridge M^-1 + sum of k k^T and D the total change so far, the step writes

    (R^0 - D K) K^T (A + K K^T)^-1,

after which D (A + K K^T) = sum of r k^T over all facts: the solution of one joint edit (recursive least squares), in
any order and any cut into steps. So single facts can be changed exactly:

    correct:  D + (r_new - r_old) k^T A^-1, A unchanged; a second copy of k in A would leave the mean of both targets
    delete:   D + (D k - r) k^T A'^-1 with A' = A - k k^T

Residuals against the edited weights and targets optimized on them, as in all releases, lead elsewhere: on tiny models
the final change differs from the joint one by 0.24 (MEMIT) to 0.58 (AlphaEdit) of its norm.

Shapes: U requests of one delta, f and d input and output width of the matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.locate.moments.solve import KeyMetric
from edit_hooks.locate.streams.carried_keys import fact_of, factor_name, ridge_name
from edit_hooks.locate.streams.key_factor import KeyFactor
from edit_hooks.modeling.architectures import is_transposed, map_shape, weight_of
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

NEEDS_ONE_LAYER = (
    "stream=exact needs one edited layer: the keys of a later one move with the edits of an earlier one, so a stream "
    "could not equal the joint edit"
)
NO_FACTOR = (
    "stream=exact needs a positive ridge that is the same at every step, and a projector P with P P = P. Set "
    "moment_weight where second_moments is null, ridge > 0 and ridge_single=true for emmet, or make P again."
)
# Parts of names in Delta.stream_state, followed by the layer and the fact.
KEY, RESIDUAL, REMOVED, TOTAL = "key", "residual", "removed", "total"


class Step(NamedTuple):
    """The update of one step as factors, and what later steps need of it.

    Attributes:
        left_UD, right_UF: rows; those of a request that a later one of the same step replaces are zero.
        state: for ``Delta.stream_state``.
    """

    left_UD: torch.Tensor
    right_UF: torch.Tensor
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class EditedMatrix:
    """The matrix of an exact stream: its layer, the name of its module, and the module."""

    layer: int
    name: str
    module: nn.Module

    @property
    def dtype(self) -> torch.dtype:
        """Precision of stored keys and residuals, and of updates."""
        return torch.promote_types(weight_of(self.module).dtype, torch.float32)

    def stored(self, update_DF: torch.Tensor) -> torch.Tensor:
        """An update in the orientation of the weight; its own inverse."""
        return update_DF.T if is_transposed(self.module) else update_DF

    def delta(self, step: Step) -> Delta:
        """A step as a delta."""
        left, right = step.left_UD.T.to(self.dtype), step.right_UF.T.to(self.dtype)
        factor = Factor(left, right, is_transposed(self.module)).detached()
        return Delta(factors={self.name: factor}, stream_state=step.state)


@dataclass(frozen=True, eq=False)
class ExactStream:
    """State of an exact stream after some steps.

    Attributes:
        factor: of A. total_DF: D, float64, on the CPU.
        residuals: fact -> r, its residual on the unedited weights, [d]. It is all that grows with the number of facts.
    """

    matrix: EditedMatrix
    metric: KeyMetric
    factor: KeyFactor
    total_DF: torch.Tensor
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, matrix: EditedMatrix, metric: KeyMetric, ridge: float | None) -> ExactStream:
        """Before the first step.

        Args:
            ridge: ``None`` if it is not the same for all keys.

        Raises:
            EditingError: the system has no factor.
        """
        width_out, width_in = map_shape(matrix.module)
        factor = None if ridge is None else KeyFactor.start(metric, ridge, width_in)
        if factor is None:
            raise EditingError(NO_FACTOR)
        return cls(matrix, metric, factor, torch.zeros(width_out, width_in, dtype=torch.float64))

    def after(self, history: Sequence[Delta]) -> ExactStream:
        """After more steps; a delta of :meth:`condensed` stands for all before it."""
        stream, layer = self, self.matrix.layer
        for delta in history:
            state = delta.stream_state
            if factor_name(layer) in state:
                factor = KeyFactor(state[factor_name(layer)], float(state[ridge_name(layer)]))
                stream = replace(stream, factor=factor, total_DF=state[f"{TOTAL}/{layer}"])
            stream = replace(
                stream,
                factor=_without(stream, _of(state, REMOVED, layer), _of(state, KEY, layer)),
                residuals={
                    fact: residual
                    for fact, residual in {**stream.residuals, **_of(state, RESIDUAL, layer)}.items()
                    if fact not in _of(state, REMOVED, layer)
                },
                total_DF=stream.total_DF + stream._update_of(delta),
            )
        return stream

    def condensed(self) -> Delta:
        """All that later steps need, as one delta without an update."""
        layer = self.matrix.layer
        state = {
            factor_name(layer): self.factor.factor_FF,
            ridge_name(layer): torch.tensor(self.factor.ridge, dtype=torch.float64),
            f"{TOTAL}/{layer}": self.total_DF,
        }
        return Delta(stream_state=state | _named(RESIDUAL, layer, self.residuals))

    def unedited(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Scope in which the matrix is as before the stream, up to the rounding of its dtype."""
        if not self.total_DF.any():
            return contextlib.nullcontext()
        undo = -self.matrix.stored(self.total_DF).to(weight_of(self.matrix.module).device, self.matrix.dtype)
        return edited(model, Delta(dense={f"{self.matrix.name}.weight": undo.contiguous()}))

    def step(self, keys_UF: torch.Tensor, residuals_UD: torch.Tensor, requests: Sequence[EditRequest]) -> Step:
        """The update that adds facts, and corrects those that the stream has.

        Args:
            keys_UF, residuals_UD: read on the unedited weights, float64.
        """
        last = {fact_of(request): row for row, request in enumerate(requests)}  # of edits of one fact the last counts
        new = {fact: row for fact, row in last.items() if fact not in self.residuals}
        old = {fact: row for fact, row in last.items() if fact in self.residuals}
        rows, old_rows = list(new.values()), list(old.values())
        coordinates_UF = self.metric.coordinates(keys_UF)
        products_UF = self.factor.products(coordinates_UF)
        left_UD, right_UF = torch.zeros_like(residuals_UD), torch.zeros_like(keys_UF)
        right_UF[rows] = self.factor.right_factors(coordinates_UF[rows], products_UF[rows])
        left_UD[rows] = residuals_UD[rows] - keys_UF[rows] @ self.total_DF.to(keys_UF).T
        if old:
            mixed = coordinates_UF[old_rows] @ products_UF[rows].T
            right_UF[old_rows] = products_UF[old_rows] - mixed @ right_UF[rows]
            left_UD[old_rows] = residuals_UD[old_rows] - self._residuals_of(old).to(residuals_UD)
        dtype, layer = self.matrix.dtype, self.matrix.layer
        state = _named(KEY, layer, {fact: keys_UF[row].to(dtype) for fact, row in new.items()})
        state |= _named(RESIDUAL, layer, {fact: residuals_UD[row].to(dtype) for fact, row in last.items()})
        return Step(left_UD, right_UF, state)

    def removal(self, keys_UF: torch.Tensor, requests: Sequence[EditRequest]) -> Step:
        """The update that deletes facts of the stream.

        Args:
            keys_UF: as in :meth:`step`; their targets play no role.

        Raises:
            EditingError: the stream has no such fact.
        """
        row_of = {fact_of(request): row for row, request in enumerate(requests)}  # a fact can be named twice
        facts, keys_UF = list(row_of), keys_UF[list(row_of.values())]
        for fact, row in row_of.items():
            if fact not in self.residuals:
                request = requests[row]
                raise EditingError(
                    f"the fact {request.text!r} cannot be removed: it is none of the {len(self.residuals)} facts of "
                    "this stream. A fact is known by its prompt and subject; its target does not matter."
                )
        coordinates_UF = self.metric.coordinates(keys_UF)
        products_UF = self.factor.products(coordinates_UF)
        identity_UU = torch.eye(len(facts), dtype=keys_UF.dtype, device=keys_UF.device)
        right_UF = torch.linalg.solve(identity_UU - coordinates_UF @ products_UF.T, products_UF)
        left_UD = keys_UF @ self.total_DF.to(keys_UF).T - self._residuals_of(facts).to(keys_UF)
        removed = {fact: key_F.to(self.matrix.dtype) for fact, key_F in zip(facts, keys_UF, strict=True)}
        return Step(left_UD, right_UF, _named(REMOVED, self.matrix.layer, removed))

    def _residuals_of(self, facts: Sequence[str] | Mapping[str, int]) -> torch.Tensor:
        return torch.stack([self.residuals[fact] for fact in facts])

    def _update_of(self, delta: Delta) -> torch.Tensor:
        name = f"{self.matrix.name}.weight"
        if name not in delta.parameter_names:
            return torch.zeros((), dtype=torch.float64)
        return self.matrix.stored(delta.weight(name)).double().cpu()


def _without(stream: ExactStream, removed: Mapping[str, torch.Tensor], added: Mapping[str, torch.Tensor]) -> KeyFactor:
    """The factor after the keys of a step."""
    factor = stream.factor
    if removed:
        factor = factor.remove(stream.metric.coordinates(torch.stack(list(removed.values())).double()))
    if added:
        factor = factor.add(stream.metric.coordinates(torch.stack(list(added.values())).double()))
    return factor


def _named(part: str, layer: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{part}/{layer}/{fact}": tensor for fact, tensor in tensors.items()}


def _of(state: Mapping[str, torch.Tensor], part: str, layer: int) -> dict[str, torch.Tensor]:
    """Fact -> tensor of one part."""
    prefix = f"{part}/{layer}/"
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
