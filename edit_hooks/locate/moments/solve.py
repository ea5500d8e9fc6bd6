"""Second moments of keys, and the linear solves of the closed-form updates.

Shapes: E or U keys, f key width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from edit_hooks.locate.moments.matrix_files import matrix_file
from edit_hooks.modeling.architectures import architecture_of, map_shape, unwrapped
from edit_hooks.modeling.memory import PlacedMatrix, decomposition_device, has_room
from edit_hooks.modeling.tensors import read_tensors
from edit_hooks.utils.errors import EditingError

RELATIVE_RIDGE = 1e-8  # of the mean eigenvalue


class KeyMetric(Protocol):
    """A positive semi-definite map M on keys: the constraint of an update.

    It decides how far an update reaches beyond the edited keys.

    C^-1 for MEMIT, (lambda C + nu I)^-1 for EMMET, the null-space projector for AlphaEdit.
    """

    @property
    def warnings(self) -> list[str]:
        """Reasons why edits under this constraint may be poor, for users."""

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """M k for every key, [E, f]."""

    def coordinates(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """The keys as the system of ``root`` has them: k, or M k for a projector M."""

    def root(self, width: int) -> torch.Tensor | None:
        """Upper triangular R with R^T R = M^-1, [f, f], float64, on the CPU; the identity for a projector.

        ``None`` if there is none to sufficient precision.
        """

    def describe(self) -> dict[str, Any]:
        """The constraint as it appears in results (JSON-able)."""


@dataclass
class SecondMoment:
    """C = E[k k^T] of a layer's keys, or the identity.

    As a :class:`KeyMetric` it is C^-1.

    Attributes:
        matrix_FF: C, [f, f]; ``None`` for the identity.
        report: where C comes from (JSON-able), as its collection recorded it; empty when unknown.
    """

    matrix_FF: torch.Tensor | None
    report: dict[str, Any] = field(default_factory=dict)
    _warnings: list[str] = field(default_factory=list, repr=False)
    _factor: PlacedMatrix | None = field(default=None, init=False, repr=False, compare=False)
    _inverse_FF: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """``"identity"`` or ``"second_moment"``; results name the constraint of an edit."""
        return "identity" if self.matrix_FF is None else "second_moment"

    @property
    def warnings(self) -> list[str]:
        """Warnings of the collection of C, and of the solves made with it so far."""
        return [*self.report.get("warnings", []), *self._warnings]

    def solve(self, keys_EF: torch.Tensor, precision: Literal["float32", "float64"]) -> torch.Tensor:
        """C^-1 k for every key, [E, f].

        Args:
            precision: ``"float64"`` uses a Cholesky factor, with a small ridge (and a warning) if C is singular;
                ``"float32"`` multiplies by the plain inverse in the keys' precision, as the released ROME does.

        Raises:
            EditingError: when C is not positive definite (``"float64"``) or has no inverse (``"float32"``).
        """
        if self.matrix_FF is None:
            return keys_EF
        if precision == "float32":
            return keys_EF @ self._inverse(self.matrix_FF, keys_EF).T
        keys_FE = keys_EF.double().T
        factor_FF = self._cholesky_factor(self.matrix_FF, keys_EF.device).like(keys_FE)
        return torch.cholesky_solve(keys_FE, factor_FF).T.to(keys_EF.dtype)

    def _inverse(self, matrix_FF: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """C^-1 on the device and in the type of a tensor, computed once for both.

        Raises:
            EditingError: when C has no inverse.
        """
        known_FF = self._inverse_FF
        if known_FF is not None and (known_FF.device, known_FF.dtype) == (like.device, like.dtype):
            return known_FF
        inverse_FF, info = torch.linalg.inv_ex(matrix_FF.to(like))
        if int(info) or not torch.isfinite(inverse_FF).all():
            raise EditingError(
                "the second moment C is singular, so it has no inverse in float32. Use inverse_dtype=float64, "
                "which adds a small ridge, or collect C from more tokens (lm-edit stats shows how many it had)."
            )
        num_bytes = inverse_FF.numel() * inverse_FF.element_size()
        if like.device.type != "cuda" or has_room(like.device, num_bytes):
            self._inverse_FF = inverse_FF
        return inverse_FF

    def _cholesky_factor(self, matrix_FF: torch.Tensor, device: torch.device) -> PlacedMatrix:
        """Lower Cholesky factor of C, computed at the first call, on a GPU if it has room."""
        if self._factor is None:
            factor_FF, ridge = _cholesky(matrix_FF.to(decomposition_device(matrix_FF, device)).double())
            # in main memory: on an accelerator the factors of all layers stay only while there is room
            self._factor = PlacedMatrix(factor_FF.cpu())
            if ridge:
                self._warnings.append(
                    f"the second moment C is singular to working precision; a ridge of {ridge:.1e} is added to it."
                )
        return self._factor

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """C^-1 k for every key, [E, f], solved in float64."""
        return self.solve(keys_EF, "float64")

    def coordinates(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """The keys themselves."""
        return keys_EF

    def root(self, width: int) -> torch.Tensor | None:
        """Upper triangular R with R^T R = C, [f, f], float64, on the CPU."""
        if self.matrix_FF is None:
            return torch.eye(width, dtype=torch.float64)
        return self._cholesky_factor(self.matrix_FF, self.matrix_FF.device).matrix.T.contiguous()

    def describe(self) -> dict[str, Any]:
        """The constraint as it appears in results (JSON-able)."""
        corpus = self.report.get("description", {}).get("corpus")
        constraint = {"constraint": self.kind}
        if not corpus:
            return constraint
        return {**constraint, "moment_corpus": corpus, "moment_tokens": self.report["num_tokens"]}


def _cholesky(matrix_FF: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Lower Cholesky factor, and the ridge that was added (0 if none was needed).

    The second ridge tried bounds the error of storing C in float32 in its smallest eigenvalues.
    """
    factor_FF, info = torch.linalg.cholesky_ex(matrix_FF)
    if not int(info):
        return factor_FF, 0.0
    rounding = torch.finfo(torch.float32).eps * float(matrix_FF.norm())
    identity_FF = torch.eye(len(matrix_FF), dtype=matrix_FF.dtype, device=matrix_FF.device)
    for ridge in (RELATIVE_RIDGE * float(matrix_FF.diagonal().mean()), rounding):
        factor_FF, info = torch.linalg.cholesky_ex(matrix_FF + ridge * identity_FF)
        if not int(info) and ridge > 0:
            return factor_FF, ridge
    raise EditingError(
        "the second moment C is not positive definite, also with a small ridge: it is no mean of k k^T, or was "
        "collected from keys that are all zero. Collect it again (lm-edit stats) or check the matrix."
    )


def ridge_keys(keys_UF: torch.Tensor, products_UF: torch.Tensor, ridge: float) -> torch.Tensor:
    """Right factors of a batch update R A^T, as rows [U, f].

    A = M K (ridge I + K^T M K)^-1.

    M is the metric of the method (:class:`KeyMetric`): C^-1 for MEMIT (ridge = lambda), the null-space projector for
    AlphaEdit (ridge = L2), (lambda C + nu I)^-1 for EMMET (ridge = eps). With M = C^-1 this equals
    (ridge C + K K^T)^-1 K, the form in the papers, by the push-through identity; the system is U x U instead of f x f.

    Args:
        keys_UF: keys as rows. products_UF: M times each key.
        ridge: added to the diagonal; with 0 the keys are mapped exactly (pseudo-inverse for dependent keys).
    """
    gram_UU = keys_UF @ products_UF.T
    gram_UU = (gram_UU + gram_UU.T) / 2
    system_UU = gram_UU + ridge * torch.eye(len(gram_UU), dtype=gram_UU.dtype, device=gram_UU.device)
    factor_UU, info = torch.linalg.cholesky_ex(system_UU)
    if int(info):
        return torch.linalg.pinv(system_UU, hermitian=True) @ products_UF
    return torch.cholesky_solve(products_UF, factor_UU)


def load_second_moments(source: object, layers: Sequence[int], model: nn.Module) -> dict[int, SecondMoment]:
    """Second moments of the edited layers; the identity for ``None``.

    Other sources are read by :func:`load_matrices`.

    Raises:
        EditingError: for matrices that are not symmetric, and as in :func:`load_matrices`.
    """
    if source is None:
        return {layer: SecondMoment(None) for layer in layers}
    matrices = load_matrices(source, layers, model)
    for layer, matrix_FF in matrices.items():
        if not torch.allclose(matrix_FF, matrix_FF.T, rtol=1e-3, atol=1e-4 * float(matrix_FF.abs().max())):
            raise EditingError(f"the second moment of layer {layer} is not symmetric; C = E[k k^T] is needed, [f, f].")
    return {layer: SecondMoment(matrix) for layer, matrix in matrices.items()}


def load_matrices(
    source: object, layers: Sequence[int], model: nn.Module, name: str = "second_moments"
) -> dict[int, torch.Tensor]:
    """One [f, f] matrix per edited layer.

    Args:
        source: a mapping layer -> tensor, or a safetensors file with tensors ``layerN``, here or on the hub.
        name: the setting, for error messages.

    Raises:
        EditingError: for unreadable files, missing layers, matrices of the wrong size, and entries that are not finite.
    """
    if isinstance(source, (str, Path)):
        _, tensors = read_tensors(matrix_file(source), f"file of {name!r}")
        try:
            source = {int(key.removeprefix("layer")): tensor for key, tensor in tensors.items()}
        except ValueError:
            raise EditingError(f"{name!r} in {source} has other tensors than layer<N>: {sorted(tensors)}.") from None
    if not isinstance(source, Mapping):
        raise EditingError(
            f"{name!r} is {type(source).__name__}; accepted: null, a safetensors file, or layer -> matrix."
        )
    matrices = {int(layer): matrix for layer, matrix in source.items()}
    inner = unwrapped(model)
    for layer in layers:
        if layer not in matrices:
            raise EditingError(f"{name!r} has no matrix for layer {layer}; it has {sorted(matrices)}.")
        width = map_shape(inner.get_submodule(architecture_of(inner).rewrite_name(layer)))[1]
        if tuple(matrices[layer].shape) != (width, width):
            raise EditingError(
                f"the matrix of layer {layer} in {name!r} has shape {tuple(matrices[layer].shape)}; "
                f"the keys have width {width}, so [{width}, {width}] is needed."
            )
        if not torch.isfinite(matrices[layer]).all():
            raise EditingError(f"the matrix of layer {layer} in {name!r} has entries that are not finite.")
    return {layer: matrices[layer] for layer in layers}
