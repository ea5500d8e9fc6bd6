"""Projectors onto the null space of second moments.

They are stored next to the second moment they were derived from.

Shapes: E keys, f key width, r basis vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.memory import PlacedMatrix, eigenvectors
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import write_to_cache
from edit_hooks.utils.storage.hashing import key_of

log = get_logger(__name__)


DEFAULT_ENERGY = 0.1  # share of trace(C) in the null space


NEARLY_ALL = 0.99  # share of the directions from which a projector counts as nearly the identity


NOT_IDEMPOTENT = 1e-2  # ||P P - P|| / ||P|| above which a matrix is no projector
ROUNDED_PROJECTOR = 1e-5  # ||P P - P|| / ||P|| of a projector that was stored in float32


PROTECTS_NOTHING = "the projection keeps nearly all directions of the keys, so it protects almost nothing. {remedy}"


WRITES_NOTHING = "the projection keeps hardly any direction of the keys, so hardly anything is written. {remedy}"


OTHER_THRESHOLD = "Choose another nullspace_threshold, or none: nullspace_energy then decides, a share of trace(C)."


NO_PROJECTOR = "the given matrix P is no projector: P P differs from P by more than a hundredth."


OTHER_MATRIX = "Make P from more text or with another threshold."


@dataclass
class Projector:
    """P = U U^T onto the directions where C is nearly zero.

    Stored as the smaller of two orthonormal bases, of the null space or its complement.

    A :class:`~edit_hooks.locate.moments.solve.KeyMetric`.

    Attributes:
        basis_FR: columns spanning the null space, or its complement, [f, r].
        is_complement: whether P = I - basis basis^T.
        threshold: eigenvalues of C below it count as zero.
        trace: trace(C), the mean squared norm of the keys behind it.
        moment_warnings: warnings about C.
    """

    basis_FR: torch.Tensor
    is_complement: bool
    threshold: float
    trace: float
    moment_warnings: tuple[str, ...] = ()
    _placed: PlacedMatrix = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._placed = PlacedMatrix(self.basis_FR)

    @property
    def rank(self) -> int:
        width, columns = self.basis_FR.shape
        return width - columns if self.is_complement else columns

    @property
    def share(self) -> float:
        """rank(P) / f: 1 keeps every direction, 0 none."""
        return self.rank / len(self.basis_FR)

    @property
    def warnings(self) -> list[str]:
        """Warnings about C, and about a null space of nearly everything or nothing."""
        return [*self.moment_warnings, *_share_warnings(self.share, OTHER_THRESHOLD)]

    def check(self, layer: int) -> None:
        """Refuse a projector through which nothing can be written.

        Raises:
            EditingError: when the null space is empty.
        """
        if self.rank == 0:
            raise EditingError(
                f"layer {layer}: no eigenvalue of C lies below nullspace_threshold={self.threshold:.3g}, so nothing "
                "can be written. Raise the threshold, or leave it out: then nullspace_energy, a share of trace(C), "
                "decides."
            )

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f], in the keys' precision."""
        basis_FR = self._placed.like(keys_EF)
        inside_EF = (keys_EF @ basis_FR) @ basis_FR.T
        return keys_EF - inside_EF if self.is_complement else inside_EF

    def coordinates(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f]."""
        return self.metric_product(keys_EF)

    def root(self, width: int) -> torch.Tensor | None:
        """The identity, which maps the null space to itself."""
        return torch.eye(width, dtype=torch.float64)

    def describe(self) -> dict[str, Any]:
        """The constraint as it appears in results (JSON-able)."""
        return {"constraint": "null_space", "null_space_share": self.share, "nullspace_threshold": self.threshold}


@dataclass
class MatrixProjector:
    """A projector supplied as a matrix, used unchanged.

    A :class:`~edit_hooks.locate.moments.solve.KeyMetric`.
    """

    matrix_FF: torch.Tensor
    trace: float | None = None
    _placed: PlacedMatrix = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._placed = PlacedMatrix(self.matrix_FF)

    def metric_product(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f], in the keys' precision."""
        return keys_EF @ self._placed.like(keys_EF).T

    def coordinates(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k for every key, [E, f]."""
        return self.metric_product(keys_EF)

    def root(self, width: int) -> torch.Tensor | None:
        """The identity; ``None`` if P P differs from P by more than the rounding of float32."""
        return torch.eye(width, dtype=torch.float64) if self.defect < ROUNDED_PROJECTOR else None

    @functools.cached_property
    def defect(self) -> float:
        """||P P - P|| / ||P||."""
        matrix_FF = self.matrix_FF.double()
        return float((matrix_FF @ matrix_FF - matrix_FF).norm() / matrix_FF.norm())

    @functools.cached_property
    def share(self) -> float:
        """rank(P) / f; the trace of a projector is its rank."""
        return float(self.matrix_FF.diagonal().double().sum()) / len(self.matrix_FF)

    @functools.cached_property
    def warnings(self) -> list[str]:
        """Warnings about the matrix.

        It may keep nearly everything or nearly nothing, or be no projector.
        """
        warnings = _share_warnings(self.share, OTHER_MATRIX)
        return [*warnings, NO_PROJECTOR] if self.defect > NOT_IDEMPOTENT else warnings

    def check(self, layer: int) -> None:
        """Refuse a projector through which nothing can be written.

        Raises:
            EditingError: when the null space is empty.
        """
        if float(self.matrix_FF.abs().max()) == 0:
            raise EditingError(f"layer {layer}: the given projector is zero, so nothing can be written. {OTHER_MATRIX}")

    def describe(self) -> dict[str, Any]:
        """The constraint as it appears in results (JSON-able)."""
        return {"constraint": "null_space", "null_space_share": self.share, "nullspace_threshold": None}


def _share_warnings(share: float, remedy: str) -> list[str]:
    if share > NEARLY_ALL:
        return [PROTECTS_NOTHING.format(remedy=remedy)]
    return [WRITES_NOTHING.format(remedy=remedy)] if share < 1 - NEARLY_ALL else []


def null_space(values_F: torch.Tensor, vectors_FF: torch.Tensor, threshold: float) -> Projector:
    """Projector onto the eigenvectors of C with eigenvalues below ``threshold``.

    Small negative eigenvalues, which are rounding errors, are included.

    Args:
        values_F, vectors_FF: eigenvalues in ascending order, and eigenvectors as columns.
    """
    rank = int((values_F < threshold).sum())
    is_complement = rank > len(values_F) // 2
    basis_FR = vectors_FF[:, rank:] if is_complement else vectors_FF[:, :rank]
    return Projector(basis_FR.clone(), is_complement, threshold, float(values_F.sum()))


def null_space_of(
    moment: SecondMoment, threshold: float | None, energy: float = DEFAULT_ENERGY, device: torch.device | None = None
) -> Projector:
    """Projector onto the directions where C is nearly zero.

    Loaded if it was stored next to C before.

    Args:
        threshold: eigenvalues below it count as zero. ``None``: the largest null space that holds at most ``energy`` of
            trace(C).
        device: where to compute the eigenvectors if there is room; the CPU by default.
    """
    assert moment.matrix_FF is not None
    path: Path | None = None
    key = {
        "projector of": moment.report.get("description"),
        "threshold": threshold,
        "energy": None if threshold is not None else energy,
    }
    if "folder" in moment.report:
        path = Path(moment.report["folder"]) / key_of(key)[:2] / f"{key_of(key)}.safetensors"
    projector = _load_projector(path, key) if path is not None else None
    if projector is None:
        projector = _compute(moment.matrix_FF, threshold, energy, device)
        if path is not None:
            _save_projector(path, key, projector)
    return dataclasses.replace(projector, moment_warnings=tuple(moment.warnings))


def _compute(matrix_FF: torch.Tensor, threshold: float | None, energy: float, device: torch.device | None) -> Projector:
    values_F, vectors_FF = eigenvectors(matrix_FF, device)
    if threshold is None:
        below_F = values_F.clamp(min=0).cumsum(0) <= energy * values_F.clamp(min=0).sum()
        rank = int(below_F.sum())
        threshold = float(values_F[min(rank, len(values_F) - 1)])
    return null_space(values_F, vectors_FF, threshold)


def _save_projector(path: Path, key: dict[str, Any], projector: Projector) -> None:
    numbers = {"is_complement": projector.is_complement, "threshold": projector.threshold, "trace": projector.trace}
    header = {"key": json.dumps(key), "projector": json.dumps(numbers)}
    header["checksum"] = _checksum(header, projector.basis_FR)
    write_to_cache(path, lambda: write_tensors(path, {"basis": projector.basis_FR}, header), path.parents[1])


def _load_projector(path: Path, key: dict[str, Any]) -> Projector | None:
    """Load a projector; ``None`` if there is none.

    Damaged files and files with another key are ignored with a warning.
    """
    if not os.path.lexists(path):
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header, basis_FR = file.metadata(), file.get_tensor("basis")
        if json.loads(header["key"]) != key:
            raise EditingError("it was computed for something else")
        if header.pop("checksum", None) != _checksum(header, basis_FR):
            raise EditingError("its checksum differs")
        return Projector(basis_FR, **json.loads(header["projector"]))
    except Exception as error:  # any damage: report it and compute the projector again
        log.warning("cannot use the projector in %s (%s); it is computed again.", path, error)
        return None


def _checksum(header: dict[str, str], basis_FR: torch.Tensor) -> str:
    return key_of([header, list(basis_FR.shape), str(basis_FR.dtype), tensor_digest(basis_FR)])
