"""REVIVE: keep the leading singular triplets of the original weight.

Method of "Spectral Characterization and Mitigation of Sequential Knowledge Editing Collapse" (2601.11042), by its
formula: no code was released. With W = sum_i s_i u_i v_i^T the weight before the stream, U and V its k leading singular
vectors, an update D of any editor is written as

    (I - U U^T) D (I - V V^T)

k is the least number of triplets that hold the share ``energy`` of sum_i s_i^2 (``energy_of: values``: of sum_i s_i).
So (W + D') v_i = s_i u_i and u_i^T (W + D') = s_i v_i^T for i <= k after any number of steps: the leading triplets stay
singular triplets. The projection is linear and idempotent, and a low-rank update keeps its rank.

The paper leaves open which energy and which share is meant; the defaults are this package's. As in the other wrappers,
the projection happens after the base editor has finished all its layers. The vectors are computed once per weight and
stored beside the statistics, under the digest of the weight; the steps of a stream carry that digest alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import read_parameter
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.locate.moments.leading import EnergyOf, leading_vectors, without_directions
from edit_hooks.locate.moments.stored_matrices import load_matrices, save_matrices
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import SHARE_BELOW_ONE
from edit_hooks.utils.storage.files import cache_root

UpdateT = TypeVar("UpdateT", Factor, torch.Tensor)

ORIGINALS = "revive_originals"  # in Delta.meta
FORMAT, FOLDER = "lm-eval-editing/singular-vectors/1", "singular_vectors"
LITTLE = 0.1  # share of an update's norm
LITTLE_WARNING = (
    "less than a tenth of the norm of the update of a weight is left, because the rest lies in the protected "
    "directions; the edit may not take effect. Set a smaller energy."
)


@dataclass(kw_only=True)
class REVIVEConfig(WrapperConfig):
    """Settings of the projection."""

    energy: float = config_field(
        "share of the energy of the original weight whose leading singular triplets are kept; 0: none, the base "
        "editor's update is written whole",
        within=SHARE_BELOW_ONE,
        default=0.5,
    )
    energy_of: EnergyOf = config_field(
        "the energy is the sum of the squares of the singular values, or of the values", default="squares"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_settings.get("stream") == "exact":
            raise EditingError(
                "base_settings have stream: exact, which counts on the whole update being written, and revive writes a "
                "part of it. Drop stream: exact."
            )


class SingularVectors(NamedTuple):
    """The k leading singular vectors of a weight in its stored orientation, [rows, k] and [columns, k]."""

    left_DK: torch.Tensor
    right_FK: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, config: REVIVEConfig) -> SingularVectors:
        """Computed in float64; returned on the CPU, float32 or wider."""
        dtype = at_least_float32(weight[:0]).dtype
        left_DK, right_FK = leading_vectors(weight.detach(), config.energy, config.energy_of)
        return cls(left_DK.to("cpu", dtype).contiguous(), right_FK.to("cpu", dtype).contiguous())


def without_leading(update: UpdateT, vectors: SingularVectors) -> UpdateT:
    """An update of a weight without its part in the leading directions; a factor keeps its rank."""
    left, right = vectors
    if isinstance(update, Factor):
        if update.transposed:
            left, right = right, left
        left_side, right_side = without_directions(update.left.T, left).T, without_directions(update.right.T, right).T
        return update._replace(left=left_side, right=right_side)
    return without_directions(without_directions(update.T, left).T, right).contiguous()


class REVIVE(PostProcessingEditor[REVIVEConfig]):
    """A base editor's update without its part in the leading directions of the weight."""

    name = "revive"
    config_class = REVIVEConfig
    stream_growth = StreamGrowth("as its base", "as its base")
    # Half the energy of a matrix as small as the contract's would be a large part of its directions.
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "energy": 0.1,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self.reads_past_updates = self.base.reads_past_updates
        self._vectors: dict[str, SingularVectors] = {}  # by digest of the weight

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        condensed, originals = self.base.condensed(model, history), _originals(history)
        if not originals:
            return condensed
        *earlier, last = condensed or [Delta()]
        return [*earlier, dataclasses.replace(last, meta={**last.meta, ORIGINALS: originals})]

    def warnings(self, job: EditJob[REVIVEConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        is_little = any(facts["kept_norm_share"] < LITTLE for facts in delta.diagnostics["revive"].values())
        return [*super().warnings(job, requests, delta), *([LITTLE_WARNING] if is_little else [])]

    def compute(self, job: EditJob[REVIVEConfig]) -> list[Delta]:
        originals = _originals(job.history)
        return [self._projected(job, delta, originals) for delta in self.base_edits(job)]

    @torch.no_grad()
    def _projected(self, job: EditJob[REVIVEConfig], delta: Delta, originals: Mapping[str, str]) -> Delta:
        """The delta without the leading directions of its matrices.

        Args:
            originals: digests of the weights before the first step of the stream that changed them.
        """
        delta = beside_weights(job.model, delta)
        masked = [f"{module}.weight" for module in delta.masks]
        dense = {**delta.dense, **{name: delta.weight(name) for name in masked}}
        factors = {name: factor for name, factor in delta.factors.items() if name not in delta.masks}
        digests, report = dict(originals), {}
        for name in delta.parameter_names:
            module = name.removesuffix(".weight")
            if module not in factors and dense[name].dim() != 2:
                continue  # a bias has no singular vectors
            weight = read_parameter(job.model, name)
            digest = digests.setdefault(name, tensor_digest(weight))
            vectors = self._of_weight(digest, None if name in originals else weight, job.config)
            shares = [_project(factors, module, vectors)] if module in factors else []
            shares += [_project(dense, name, vectors)] if name in dense else []
            report[name] = {"num_kept": vectors.left_DK.shape[1], "kept_norm_share": min(shares)}
        meta = {**delta.meta, ORIGINALS: digests}
        projected = dataclasses.replace(delta, factors=factors, dense=dense, masks={}, meta=meta)
        ratio = largest_norm_ratio(job.model, projected)
        projected.diagnostics = {**delta.diagnostics, "revive": report, "update_norm_ratio": ratio}
        return projected

    def _of_weight(self, digest: str, weight: torch.Tensor | None, config: REVIVEConfig) -> SingularVectors:
        """The vectors of the weight with a digest: known, stored, or computed from it.

        Args:
            weight: ``None`` if it is no longer there, because a stream changed it.

        Raises:
            EditingError: for a weight that is neither known nor there.
        """
        if digest not in self._vectors:
            description = {"format": FORMAT, "weight": digest, "energy": config.energy, "of": config.energy_of}
            root = cache_root() / FOLDER
            stored = load_matrices(root, description, "singular vectors")
            if stored is not None:
                self._vectors[digest] = SingularVectors(stored.matrices["left"], stored.matrices["right"])
            elif weight is not None:
                self._vectors[digest] = SingularVectors.of(weight, config)
                save_matrices(root, description, {}, dict(zip(("left", "right"), self._vectors[digest], strict=True)))
            else:
                raise EditingError(
                    f"the singular vectors of the weights before this stream are no longer in {root}, and the weights "
                    "have changed since. Make the stream from its first step."
                )
        return self._vectors[digest]


def _originals(history: Sequence[Delta]) -> dict[str, str]:
    """By parameter the digest of the weight before the first step that changed it."""
    originals: dict[str, str] = {}
    for delta in reversed(history):
        originals |= delta.meta.get(ORIGINALS, {})
    return originals


def _project(updates: dict[str, UpdateT], key: str, vectors: SingularVectors) -> float:
    """Project one of the updates in place; returns the share of its norm that is left."""
    before = _norm(updates[key])
    updates[key] = without_leading(updates[key], vectors)
    return _norm(updates[key]) / before if before else 1.0


def _norm(update: Factor | torch.Tensor) -> float:
    if isinstance(update, Factor):
        left, right = update.left.double(), update.right.double()
        return math.sqrt(max(float(((left.T @ left) * (right.T @ right)).sum()), 0.0))
    return float(update.norm())
