"""AlphaEdit: MEMIT with updates projected onto a null space of keys.

"AlphaEdit: Null-Space Constrained Knowledge Editing for Language Models". Targets z, keys K and residuals R as in
MEMIT. With C = E[k k^T] over ordinary text and P = U U^T over its eigenvectors with eigenvalues below
``nullspace_threshold``, the released code solves for every layer

    [P (K K^T + S) + L2 I] X = P K R^T,   W <- W + X^T,

where S is the sum of K_p K_p^T over the earlier steps of a stream, with keys read after each step's edits. (The paper
writes the identity with coefficient 1 instead of L2.) By the push-through identity, with K' = [K_p, K], R' = [0, R],

    X^T = R' (K'^T P K' + L2 I)^-1 K'^T P,

so only a system of the size of the keys is solved (float64), the update has rank u, and of the f x f matrices only a
basis of the null space is stored. The update stays in that space: X^T P = X^T.

The threshold is absolute on a C normalized per token, so its effect depends on the model. The diagnostics give the null
space's share of all directions, rank(P) / f: near 1 the projection protects nothing, near 0 nothing can be written.
Without a threshold, the null space is the largest that holds at most ``nullspace_energy`` of trace(C). L2 (10, or 1, in
the releases) is likewise absolute on the scale of squared key norms; without one it is a hundredth of their mean,
trace(C).

With ``deflation``, as in EvoEdit (2510.13851), the keys of earlier steps are not in S: their directions leave P instead
(:mod:`edit_hooks.locate.streams.deflated`), so later updates do not change their values at all. EvoEdit has L2 = 1.

S covers the deltas of ``history`` and nothing else. Released frameworks carry S over between "independent" edits; to
reproduce that, pass the earlier deltas as history on the unedited model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import CONTRACT_TEXTS
from edit_hooks.base.footprint import FLOAT32, FLOAT64, StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.memit import REPEATED_FACT_WARNING, MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.moments.matrix_files import matrix_file
from edit_hooks.locate.moments.null_space import MatrixProjector, Projector, null_space_of
from edit_hooks.locate.moments.solve import KeyMetric, load_matrices
from edit_hooks.locate.streams.carried_keys import FACTS, CarriedKeys
from edit_hooks.locate.streams.deflated import DeflatedProjector, directions_name
from edit_hooks.locate.value_editor import VALUE_CONTRACT_SETTINGS
from edit_hooks.modeling.architectures import architecture_of, input_device, map_shape, unwrapped
from edit_hooks.modeling.memory import DECOMPOSITION_COPIES
from edit_hooks.modeling.tensors import require_tensors
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import INNER_SHARE, POSITIVE
from edit_hooks.utils.storage.files import path_digest

DEFAULT_L2, RELATIVE_L2 = 10.0, 0.01
LITTLE_WRITTEN = 0.1
DEFLATED_WARNING = (
    "less than a tenth of the residual was written, because the keys of the edit lie among those of earlier ones, "
    "whose directions left the projector (deflation). A fact cannot be corrected so; use carry_keys without deflation."
)


@dataclass(kw_only=True)
class AlphaEditConfig(MEMITConfig):
    """MEMIT's settings and those of the projection; ``moment_weight`` has no effect."""

    nullspace_threshold: float | None = config_field(
        "eigenvalues of C below this count as zero; null: by nullspace_energy", within=POSITIVE, default=None
    )
    nullspace_energy: float = config_field(
        "share of trace(C) in the null space if no threshold is set",
        within=INNER_SHARE,
        instead_of="nullspace_threshold",
        default=0.1,
    )
    l2: float | None = config_field(
        "L2, the coefficient of the identity; null: a hundredth of trace(C), or 10 where C is unknown",
        within=POSITIVE,
        default=None,
    )
    projectors: Any = config_field(
        "projector P per layer, used instead of second moments: a safetensors file or a mapping from layer to matrix",
        instead_of=(
            "second_moments",
            "moment_tokens",
            "moment_length",
            "moment_dtype",
            "nullspace_threshold",
            "nullspace_energy",
        ),
        default=None,
    )
    projectors_digest: str | None = config_field("set by the editor: checksum of the file of P", default=None)
    carry_keys: bool = config_field("in a stream, protect the keys of earlier steps", default=True)
    deflation: float | None = config_field(
        "in a stream, take the directions of each step's keys out of the projector, but for those that hold less than "
        "this share of ||K|| (EvoEdit; 0.01); null: the projector stays, and the keys of earlier steps join the system",
        within=INNER_SHARE,
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_moments is None and self.projectors is None:
            raise EditingError(
                "AlphaEdit needs the null space of real keys; second_moments=null (the identity) has none. "
                "Use 'self', a text file or a hub id, or set 'projectors'."
            )
        if self.deflation is not None and (self.stream == "exact" or not self.carry_keys):
            raise EditingError(
                "deflation is how a stream protects the keys of earlier steps, and no such stream equals a joint edit; "
                "drop it, or drop stream: exact and carry_keys: false."
            )


class AlphaEdit(ResidualSpreadingEditor[AlphaEditConfig]):
    """MEMIT with updates projected onto a null space of keys."""

    name = "alphaedit"
    config_class = AlphaEditConfig
    config_folders: tuple[str, ...] = ("alphaedit",)
    stream_growth = StreamGrowth(
        "per layer f numbers per edit up to f/2 edits, then the factor of the system: f^2 numbers of eight bytes "
        "(1.6 GB at f = 14,336)",
        "up to f/2 edits",
    )
    writes_states = True
    states_settings: ClassVar[Settings] = {**ResidualSpreadingEditor.states_settings, "deflation": None}
    contract_settings: ClassVar[Settings] = {
        **VALUE_CONTRACT_SETTINGS,
        "layers": [0, 1],
        "second_moments": CONTRACT_TEXTS,
        "nullspace_energy": 0.9,
        "l2": 0.02,
    }

    def default_config(self, model: nn.Module) -> AlphaEditConfig:
        config = super().default_config(model)
        is_path = isinstance(config.projectors, (str, os.PathLike))
        digest = path_digest(matrix_file(config.projectors)) if is_path else None
        config.record_digest("projectors_digest", "projectors", digest)
        return config

    def check_inputs(self, config: AlphaEditConfig) -> None:
        if config.projectors is None:
            super().check_inputs(config)
        elif isinstance(config.projectors, (str, os.PathLike)):
            require_tensors(matrix_file(config.projectors), "file of 'projectors'")

    def load_constraints(
        self, config: AlphaEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Mapping[int, KeyMetric]:
        projectors: dict[int, Projector | MatrixProjector] = {}
        if config.projectors is not None:
            matrices = load_matrices(config.projectors, config.edited_layers, model, "projectors")
            projectors.update((layer, MatrixProjector(matrix)) for layer, matrix in matrices.items())
        else:
            threshold, energy, device = config.nullspace_threshold, config.nullspace_energy, input_device(model)
            for layer, moment in self.load_moments(config, model, tokenizer).items():
                projectors[layer] = null_space_of(moment, threshold, energy, device)
        for layer, projector in projectors.items():
            projector.check(layer)
        return projectors

    # -- a deflated projector ------------------------------------------------------------------------------------------

    def carried_keys(
        self, model: nn.Module, config: AlphaEditConfig, history: Sequence[Delta], layer: int
    ) -> CarriedKeys:
        steps = () if config.deflation is not None else history  # their keys left the projector
        return super().carried_keys(model, config, steps, layer)

    def metric(self, job: EditJob[AlphaEditConfig], layer: int) -> KeyMetric:
        return self._deflated(job, layer) if job.config.deflation is not None else super().metric(job, layer)

    def _deflated(self, job: EditJob[AlphaEditConfig], layer: int) -> DeflatedProjector:
        width = map_shape(job.model.get_submodule(architecture_of(job.model).rewrite_name(layer)))[1]
        return DeflatedProjector.after(job.history, layer, width, super().metric(job, layer))

    def state_of_keys(
        self, job: EditJob[AlphaEditConfig], layer: int, keys_UF: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if job.config.deflation is None:
            return super().state_of_keys(job, layer, keys_UF)
        directions_FQ = self._deflated(job, layer).new_directions(keys_UF, job.config.deflation)
        return {directions_name(layer): directions_FQ}

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        inner = unwrapped(model)
        config = self._resolved[inner]
        if config.deflation is None or not history:
            return super().condensed(model, history)
        names = [directions_name(layer) for layer in config.edited_layers]
        state = {
            name: torch.cat([delta.stream_state[name] for delta in history if name in delta.stream_state], 1)
            for name in names
            if any(name in delta.stream_state for delta in history)
        }
        facts = dict.fromkeys(fact for delta in history for fact in delta.meta.get(FACTS, ()))
        return [Delta(stream_state=state, meta={FACTS: list(facts)})] if state else []

    def warnings(self, job: EditJob[AlphaEditConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        warnings = super().warnings(job, requests, delta)
        if job.config.deflation is None:
            return warnings
        shares = [record["written_share"] for record in delta.diagnostics["layers"]]
        others = [text for text in warnings if text != REPEATED_FACT_WARNING]  # a repeated fact is not written at all
        return [*others, *([DEFLATED_WARNING] if max(shares) < LITTLE_WRITTEN else [])]

    def solve_bytes(self, config: AlphaEditConfig, model: nn.Module) -> int:
        """Those of collecting C, or of the basis of the largest projector in float64."""
        basis = FLOAT64 * max(self._squares(config, model)) // 2
        return basis if config.projectors is not None else max(super().solve_bytes(config, model), basis)

    def statistics_bytes(self, config: AlphaEditConfig, model: nn.Module) -> int:
        """C and at most half of the float64 eigenvectors of every layer, and the eigenvectors of one with workspace."""
        squares = self._squares(config, model)
        if config.projectors is not None:
            return FLOAT32 * sum(squares)
        moment = FLOAT32 if config.moment_dtype == "float32" else FLOAT64
        return (moment + FLOAT64 // 2) * sum(squares) + DECOMPOSITION_COPIES * FLOAT64 * max(squares)

    def ridge(self, metric: KeyMetric, keys_UF: torch.Tensor, config: AlphaEditConfig) -> float:
        if config.l2 is not None:
            return config.l2
        assert isinstance(metric, (Projector, MatrixProjector))
        return DEFAULT_L2 if metric.trace is None else RELATIVE_L2 * metric.trace
