"""Updates of several layers, each solved with those before it in place; the loop of MEMIT and its variants.

Shapes: E requests of the call, U requests of one delta, N context templates, f and d input and output width of a map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.base.job import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.locate.moments.solve import KeyMetric
from edit_hooks.locate.streams.carried_keys import FACTS, CarriedKeys, KeySystem, fact_of
from edit_hooks.locate.streams.exact import ExactStream
from edit_hooks.locate.value_editor import batch_diagnostics
from edit_hooks.locate.values.key_reader import LayerActivations, mean_keys, read_rows
from edit_hooks.locate.values.post_norm import nearest_outputs
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_optimization import OptimizedValue
from edit_hooks.modeling.architectures import architecture_of, is_transposed, weight_of
from edit_hooks.modeling.support import contribution_scale
from edit_hooks.modeling.weights import weight_norm
from edit_hooks.utils.errors import EditingError


class LayerSolver(Protocol):
    """What the loop asks its editor: see :class:`~edit_hooks.editors.memit.ResidualSpreadingEditor`."""

    measures_output: bool

    def target_layer(self, config: Any) -> int: ...

    def divisor(self, layers_left: int) -> float: ...

    def ridge(self, metric: KeyMetric, keys_UF: torch.Tensor, config: Any) -> float: ...

    def carried_keys(self, model: nn.Module, config: Any, history: Sequence[Delta], layer: int) -> CarriedKeys: ...

    def state_of_keys(self, job: EditJob[Any], layer: int, keys_UF: torch.Tensor) -> dict[str, torch.Tensor]: ...


def uses_norm(model: PreTrainedModel, residual_mode: str) -> bool:
    """Whether residuals are mapped through the norm behind the MLP, under a ``residual_mode``.

    Raises:
        EditingError: ``residual_mode`` is ``normalized`` and the blocks have no such norm.
    """
    has_norm = architecture_of(model).post_norm is not None
    if residual_mode == "normalized" and not has_norm:
        raise EditingError(
            f"residual_mode 'normalized' needs blocks that normalize the MLP output; {model.config.model_type} "
            "adds it unchanged. Use 'auto' or 'faithful'."
        )
    return has_norm and residual_mode != "faithful"


class Readings(NamedTuple):
    """Activations of all requests under the updates so far.

    Attributes:
        keys_EF: by layer, the weighted mean keys. outputs_ED: by layer, MLP outputs of the bare prompts.
        hidden_ED: output of the block that was read last, at the bare prompts; h^L by default.
    """

    keys_EF: dict[int, torch.Tensor]
    outputs_ED: dict[int, torch.Tensor]
    hidden_ED: torch.Tensor


class LayerwiseUpdate:
    """The updates of one call, written layer by layer.

    Each group of requests shares a delta.

    Args:
        rows: per request one row per context template, the bare prompt first.
        through_norm: see :func:`uses_norm`.
    """

    def __init__(
        self,
        editor: LayerSolver,
        job: EditJob[Any],
        rows: list[list[TokenRow]],
        values: Sequence[OptimizedValue],
        through_norm: bool,
    ) -> None:
        self.editor, self.job = editor, job
        self.model, self.config, self.history = job.model, job.config, job.history
        self.requests = job.requests
        self.rows, self.values, self.through_norm = rows, values, through_norm
        self.arch = architecture_of(job.model)
        self.scale = contribution_scale(job.model)
        self.layers = job.config.edited_layers
        indices = list(range(len(rows)))
        self.groups = [indices] if job.joint else [[index] for index in indices]
        self.deltas = [Delta() for _ in self.groups]
        self.reads_in_weights = job.joint or job.config.engine == "reference"
        self.target_ED: torch.Tensor | None = None
        self.start_ED: torch.Tensor | None = None

    def state_layer(self, layer: int) -> int:
        """Hook: the block whose output the residual of a layer is measured at."""
        return self.layers[-1]

    def solved_keys(self, layer: int, keys_EF: torch.Tensor) -> torch.Tensor:
        """Hook: the keys that the system of a layer has, and that later steps of a stream protect."""
        return keys_EF

    def key_facts(self, layer: int, keys_UF: torch.Tensor) -> dict[str, Any]:
        """Hook: further diagnostics of a layer."""
        return {}

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, layers: Sequence[int], last: int) -> Readings:
        """Read all requests under the updates so far, up to the output of block ``last``."""
        read = self._read_in_weights if self.reads_in_weights else self._read_per_row
        activations = read(layers, last)
        shape = (len(self.rows), len(self.rows[0]), -1)
        keys_EF = {layer: mean_keys(keys_RF, len(self.rows)) for layer, keys_RF in activations.keys_RF.items()}
        outputs_ED = {layer: outputs_RD.view(shape)[:, 0] for layer, outputs_RD in activations.outputs_RD.items()}
        return Readings(keys_EF, outputs_ED, activations.hidden_RD.view(shape)[:, 0])

    def _read_per_row(self, layers: Sequence[int], last: int) -> LayerActivations:
        """Every request is its own group, so delta e acts on the rows of request e."""
        rows = [row for request_rows in self.rows for row in request_rows]
        deltas = [delta for delta, request_rows in zip(self.deltas, self.rows, strict=True) for _ in request_rows]
        return read_rows(self.model, rows, layers, last, deltas if deltas[0].factors else None)

    def _read_in_weights(self, layers: Sequence[int], last: int) -> LayerActivations:
        """Read group by group, with the group's delta in the weights."""
        parts = []
        for group, delta in zip(self.groups, self.deltas, strict=True):
            with edited(self.model, delta) if delta.factors else contextlib.nullcontext():
                rows = [row for edit in group for row in self.rows[edit]]
                parts.append(read_rows(self.model, rows, layers, last))
        return LayerActivations.concatenate(parts)  # groups are consecutive, so rows come out in the order of the edits

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, index: int, layer: int, metric: KeyMetric, exact: ExactStream | None = None) -> None:
        """Add the factor of ``layer``, the ``index``-th edited one, to every delta."""
        last = self.state_layer(layer)
        readings = self.read(sorted({layer, last}), last)
        keys_EF = readings.keys_EF[layer].double()
        change_ED = self.output_change(index, layer, readings)
        solved_EF = self.solved_keys(layer, keys_EF)
        past = self.editor.carried_keys(self.model, self.config, () if exact else self.history, layer)
        system = KeySystem(metric, past, solved_EF)
        for group, delta in zip(self.groups, self.deltas, strict=True):
            left_UD = change_ED[group]
            if exact:
                requests = [self.requests[edit] for edit in group]
                left_UD, right_UF, delta.stream_state = exact.step(keys_EF[group], left_UD, requests)
            else:
                right_UF = system.right_factors(group, self.editor.ridge(metric, solved_EF[group], self.config))
            self._add_factor(delta, layer, left_UD, right_UF)
            written_share = (keys_EF[group] * right_UF).sum(1).mean()  # s / (ridge + s) for a single edit
            delta.diagnostics.setdefault("layers", []).append(
                {
                    "layer": layer,
                    "update_norm_ratio": self._update_norm_ratio(delta, layer),
                    "written_share": float(written_share),
                    **metric.describe(),
                    **self.key_facts(layer, keys_EF[group]),
                }
            )
            if self.config.keep_intermediates:
                delta.intermediates |= {
                    f"keys.layer{layer}": solved_EF[group],
                    f"adj_k.layer{layer}": right_UF.T,
                    f"resid.layer{layer}": left_UD.T,
                }

    def output_change(self, index: int, layer: int, readings: Readings) -> torch.Tensor:
        """Change [E, d] of a layer's MLP outputs for its share of the residual, float64."""
        current_ED = self._current(readings)
        if self.target_ED is None:
            self.start_ED, self.target_ED = current_ED, self.targets(readings.hidden_ED)
        share_ED = (self.target_ED - current_ED) / self.editor.divisor(len(self.layers) - index)
        if not self.editor.measures_output:
            share_ED = share_ED / self.scale  # Granite scales what its blocks add to the residual stream
        if not self.through_norm:
            return share_ED
        return self.before_norm(layer, share_ED, readings)

    def before_norm(self, layer: int, share_ED: torch.Tensor, readings: Readings) -> torch.Tensor:
        """The change [E, d] of a layer's MLP outputs whose contribution behind the norm is nearest to ``share_ED``."""
        outputs_ED = readings.outputs_ED[layer].double()
        return nearest_outputs(self._post_norm(layer), outputs_ED, share_ED) - outputs_ED

    def _current(self, readings: Readings) -> torch.Tensor:
        """Current states that the targets replace, [E, d], float64.

        h^L, or with ``measures_output`` the last layer's MLP output (its contribution, where a norm follows).
        """
        if not self.editor.measures_output:
            return readings.hidden_ED.double()
        outputs_ED = readings.outputs_ED[self.layers[-1]]
        return self._normalize(outputs_ED) if self.through_norm else outputs_ED.double()

    def targets(self, hidden_ED: torch.Tensor) -> torch.Tensor:
        """z [E, d], float64."""
        v0_ED = torch.stack([value.v0_D for value in self.values]).to(hidden_ED)
        value_ED = v0_ED.double() + torch.stack([value.delta_D for value in self.values]).to(hidden_ED).double()
        if not self.through_norm:
            return value_ED
        if self.editor.measures_output:
            return self._normalize(value_ED)
        return hidden_ED.double() + self.scale * (self._normalize(value_ED) - self._normalize(v0_ED))

    def _post_norm(self, layer: int) -> nn.Module:
        return self.model.get_submodule(self.arch.post_norm_name(layer))

    @torch.no_grad()
    def _normalize(self, outputs_ED: torch.Tensor) -> torch.Tensor:
        """The contribution of the layer of the targets to the residual stream, [E, d], float64."""
        norm = self._post_norm(self.editor.target_layer(self.config))
        parameter = next(norm.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return norm(outputs_ED.to(parameter.device, dtype)).to(outputs_ED.device).double()

    def _add_factor(self, delta: Delta, layer: int, change_UD: torch.Tensor, right_UF: torch.Tensor) -> None:
        name = self.arch.rewrite_name(layer)
        module = self.model.get_submodule(name)
        dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
        delta.factors[name] = Factor(change_UD.T.to(dtype), right_UF.T.to(dtype), is_transposed(module))

    def _update_norm_ratio(self, delta: Delta, layer: int) -> float:
        """Frobenius norm of the layer's update over that of its weight."""
        name = self.arch.rewrite_name(layer)
        left, right, _ = delta.factors[name]
        # ||L R^T||^2 is the sum over the entries of (L^T L) * (R^T R): no product of the size of the weight.
        gram = (left.T.double() @ left.double()) * (right.T.double() @ right.double())
        return float(gram.sum().clamp(min=0).sqrt()) / weight_norm(self.model.get_submodule(name))

    # -- results -------------------------------------------------------------------------------------------------------

    def finish(self) -> list[Delta]:
        """Add diagnostics, and the keys that later steps protect, to the deltas."""
        readings = self.read(self.layers, self.layers[-1])
        assert self.target_ED is not None and self.start_ED is not None
        left_E = (self.target_ED - self._current(readings)).norm(dim=1)
        distance_E = (self.target_ED - self.start_ED).norm(dim=1).clamp(min=1e-30)
        for group, delta in zip(self.groups, self.deltas, strict=True):
            values = [self.values[index] for index in group]
            layers = delta.diagnostics["layers"]
            delta.diagnostics |= {
                **batch_diagnostics(values),
                "constraint": layers[0]["constraint"],
                "update_norm_ratio": max(record["update_norm_ratio"] for record in layers),
                # 0: h^L reached z; 1: it did not move; above 1: it overshot.
                "distance_left": float((left_E / distance_E)[group].mean()),
                "residual_mode": "normalized" if self.through_norm else "faithful",
            }
            if self.config.carry_keys and self.config.stream == "released":
                for layer in self.layers:
                    keys_UF = self.solved_keys(layer, readings.keys_EF[layer][group])
                    delta.stream_state |= self.editor.state_of_keys(self.job, layer, keys_UF)
                delta.meta[FACTS] = [fact_of(self.requests[edit]) for edit in group]
            if self.config.keep_intermediates:
                delta.intermediates["z"] = self.target_ED[group]
                delta.intermediates["z_delta"] = torch.stack([value.delta_D for value in values])
        return self.deltas
