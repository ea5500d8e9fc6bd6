"""Projectors onto the null space of second moments, kept on disk beside a C that was collected by us."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks.locate.solve import SecondMoment
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import replacing
from edit_hooks.utils.hashing import key_of

log = logging.getLogger(__name__)


NEARLY_ALL = 0.99


DEFAULT_ENERGY = 0.1


PROTECTS_NOTHING = "the projection keeps nearly all directions of the keys, so it protects almost nothing. {way}"


WRITES_NOTHING = "the projection keeps hardly any direction of the keys, so hardly anything is written. {way}"


OTHER_THRESHOLD = "Choose another nullspace_threshold, or none: nullspace_energy then decides, a share of trace(C)."


NOT_IDEMPOTENT = 1e-2


NO_PROJECTOR = "the given matrix P is no projector: P P differs from P by more than a hundredth."


OTHER_MATRIX = "Make P from more text or with another threshold."


@dataclass
class Projector:
    """P = U U^T on the directions where C is nearly zero, kept as the smaller of two orthonormal bases.

    Attributes:
        basis_FR: columns spanning the null space, or its complement, [f, r].
        is_complement: P = I - basis basis^T.
        threshold: eigenvalues of C below it count as zero.
        trace: trace(C), the mean squared norm of the keys behind it.
        moment_warnings: warnings about the C it was made from.
    """

    basis_FR: torch.Tensor
    is_complement: bool
    threshold: float
    trace: float
    moment_warnings: tuple[str, ...] = ()

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
        """What users should be warned of."""
        return [*self.moment_warnings, *_share_warnings(self.share, OTHER_THRESHOLD)]

    def check(self, layer: int) -> None:
        """Raise EditingError when nothing can be written through this projector."""
        if self.rank == 0:
            raise EditingError(
                f"layer {layer}: no eigenvalue of C lies below nullspace_threshold={self.threshold:.3g}, so nothing "
                "can be written. Raise the threshold, or leave it out: then nullspace_energy, a share of trace(C), "
                "decides."
            )

    def apply(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k in the keys' precision."""
        basis_FR = self.basis_FR.to(keys_EF)
        inside_EF = (keys_EF @ basis_FR) @ basis_FR.T
        return keys_EF - inside_EF if self.is_complement else inside_EF

    def describe(self) -> dict[str, Any]:
        """What results say about the constraint (JSON-able)."""
        return {"constraint": "null_space", "null_space_share": self.share, "nullspace_threshold": self.threshold}


@dataclass
class GivenProjector:
    """A projector handed in as a matrix; used as it is, whether or not it is idempotent to the last digit."""

    matrix_FF: torch.Tensor
    trace: float | None = None

    def apply(self, keys_EF: torch.Tensor) -> torch.Tensor:
        """P k in the keys' precision."""
        return keys_EF @ self.matrix_FF.to(keys_EF).T

    @functools.cached_property
    def share(self) -> float:
        """rank(P) / f; the trace of a projector is its rank."""
        return float(self.matrix_FF.diagonal().double().sum()) / len(self.matrix_FF)

    @functools.cached_property
    def warnings(self) -> list[str]:
        """What users should be warned of."""
        matrix_FF = self.matrix_FF.double()
        defect = float((matrix_FF @ matrix_FF - matrix_FF).norm() / matrix_FF.norm())
        found = _share_warnings(self.share, OTHER_MATRIX)
        return [*found, NO_PROJECTOR] if defect > NOT_IDEMPOTENT else found

    def check(self, layer: int) -> None:
        """Raise EditingError when nothing can be written through this projector."""
        if float(self.matrix_FF.abs().max()) == 0:
            raise EditingError(f"layer {layer}: the given projector is zero, so nothing can be written. {OTHER_MATRIX}")

    def describe(self) -> dict[str, Any]:
        """What results say about the constraint (JSON-able)."""
        return {"constraint": "null_space", "null_space_share": self.share, "nullspace_threshold": None}


def _share_warnings(share: float, way: str) -> list[str]:
    if share > NEARLY_ALL:
        return [PROTECTS_NOTHING.format(way=way)]
    return [WRITES_NOTHING.format(way=way)] if share < 1 - NEARLY_ALL else []


def null_space(values_F: torch.Tensor, vectors_FF: torch.Tensor, threshold: float) -> Projector:
    """Projector onto the eigenvectors of C whose eigenvalue is below ``threshold`` (round-off negatives included).

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

    Args:
        threshold: eigenvalues below it count as zero. ``None``: the largest null space that holds at most ``energy`` of
            trace(C).
        device: where to take the eigenvectors if there is room, for what is not kept yet; on the CPU when absent.
    """
    assert moment.matrix_FF is not None
    description = moment.report.get("description")
    root = Path(moment.report["folder"]) if "folder" in moment.report else None
    key = {"projector of": description, "threshold": threshold, "energy": None if threshold is not None else energy}
    path = root / key_of(key)[:2] / f"{key_of(key)}.safetensors" if root else None
    if path is not None and (found := _load_projector(path, key)):
        return dataclasses.replace(found, moment_warnings=tuple(moment.warnings))
    values_F, vectors_FF = _eigh(moment.matrix_FF, device)
    if threshold is None:
        below_F = values_F.clamp(min=0).cumsum(0) <= energy * values_F.clamp(min=0).sum()
        rank = int(below_F.sum())
        threshold = float(values_F[min(rank, len(values_F) - 1)])
    projector = null_space(values_F, vectors_FF, threshold)
    if path is not None:
        _save_projector(path, key, projector)
    return dataclasses.replace(projector, moment_warnings=tuple(moment.warnings))


def _eigh(matrix_FF: torch.Tensor, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (ascending) and eigenvectors in float64, on the CPU; which takes minutes for wide keys."""
    where = torch.device("cpu")
    if device is not None and device.type == "cuda":
        needed = 5 * 8 * matrix_FF.numel()  # the matrix, its eigenvectors, and what the solver works in
        where = device if torch.cuda.mem_get_info(device)[0] > needed else where
    values_F, vectors_FF = torch.linalg.eigh(matrix_FF.to(where).double())
    return values_F.cpu(), vectors_FF.cpu()


def _save_projector(path: Path, key: dict[str, Any], projector: Projector) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"is_complement": projector.is_complement, "threshold": projector.threshold, "trace": projector.trace}
    header = {"key": json.dumps(key), "projector": json.dumps(numbers)}
    with replacing(path) as temporary:
        save_file({"basis": projector.basis_FR.contiguous()}, temporary, metadata=header)


def _load_projector(path: Path, key: dict[str, Any]) -> Projector | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
            if json.loads(header["key"]) != key:
                raise EditingError("it was made for something else")
            return Projector(file.get_tensor("basis"), **json.loads(header["projector"]))
    except Exception as error:  # whatever is wrong with the file: say so, make it again
        log.warning("cannot use the projector in %s (%s); it is made again.", path, error)
        return None
