"""MEMIT: batches of edits written into several layers ("Mass-Editing Memory in a Transformer").

Write W_l for the rewrite module of layer l as a map R^f -> R^d, h^L for the output of the last edited block and
C_l = E[k k^T] for the keys of ordinary text. With u requests and layers l_1 < ... < l_n = L:

1. Targets: z_e = h^L + delta_e, optimized at the output of block L for every request on the unedited weights.
2. For i = 0 .. n-1, with the updates of earlier layers in place: keys K (f x u; half the bare prompt's key, half the
   mean over the other context templates), hidden states H (d x u) of the bare prompts, and (eq. 14, 19 and 20)

       R = (Z - H) / (n - i),   A = (lambda C + K K^T)^-1 K,   W <- W + R A^T.

The f x f system is solved in its exact u x u form in float64, A = C^-1 K (lambda I + K^T C^-1 K)^-1. Independent edits
(u = 1 each) go through the layers together, every row under its own rank-one terms; a joint batch is patched in.

Steps that variants override: ``load_constraints`` (whose ``apply`` stands for C^-1), :meth:`MEMIT.ridge` (what stands
for lambda), :meth:`MEMIT.optimize` (the targets), :meth:`MEMIT.divisor` (n - i) and ``measures_output`` (whether the
target and the residual are outputs of the last layer's MLP instead of h^L).

A typical key of the text behind C has k^T C^-1 k = f, so a request writes about f / (lambda + f) of each layer's share;
without a ``moment_weight`` lambda is chosen so that this is four fifths.

Blocks that normalize the MLP output before adding it (Gemma 2 and 3, OLMo 2) overshoot under step 2. There the default
is ``residual_mode: normalized``: the offset is optimized at the MLP output m of layer L, where every value can be
reached, z = h^L + n(m + delta) - n(m), and each layer's share of the residual is turned into the MLP output whose norm
is nearest to the wanted contribution (:mod:`edit_hooks.locate.post_norm`). ``faithful`` is the released algorithm
everywhere.

With ``carry_keys`` the keys K_p of earlier steps of a stream join the system, lambda C + K_p K_p^T + K K^T
("MEMIT_seq" of the AlphaEdit release); they are read with the step's edits in place and travel in
``Delta.stream_state``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from transformers import PreTrainedModel

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.locate.editor import (
    MEMIT_CONTRACT_SETTINGS,
    LocateThenEditConfig,
    LocateThenEditEditor,
    check_reach,
    forward_maker,
    value_diagnostics,
    value_settings,
)
from edit_hooks.locate.key_reader import LayerActivations, read_rows
from edit_hooks.locate.post_norm import nearest_outputs
from edit_hooks.locate.rows import Row
from edit_hooks.locate.solve import ridge_keys
from edit_hooks.locate.value_batch import Site, ValueProblem
from edit_hooks.locate.value_optimization import OptimizedValue, optimize_values
from edit_hooks.modeling.architectures import (
    architecture_of,
    is_transposed,
    linear_of,
    map_shape,
    num_layers,
)
from edit_hooks.modeling.tensors import weight_norm
from edit_hooks.utils.errors import EditingError

DEFAULT_WRITTEN_SHARE = 0.8


@dataclass(kw_only=True)
class MEMITConfig(LocateThenEditConfig):
    """Settings of MEMIT and of the editors that share its targets, keys and residual spreading."""

    num_steps: int = config_field("loss evaluations of the value optimization; one update fewer is made", default=25)
    clamp_factor: float = config_field("radius of the offset's ball in units of ||v0||", default=0.75)
    context_templates: list[str] | str = config_field("name of a template set or a list of texts", default="sampled_6")
    second_moments: Any = config_field(
        "C per layer: null (identity), self, a text file or folder, a hub id, a safetensors file, or a mapping",
        default="self",
    )
    moment_weight: float | None = config_field("lambda, the weight of C; null: by the width of the keys", default=None)
    residual_mode: Literal["auto", "faithful", "normalized"] = config_field(
        "how a residual becomes an MLP output; auto: normalized where the block normalizes it",
        default="auto",
        renamed_values={"normalised": "normalized"},
    )
    carry_keys: bool = config_field("in a stream, protect the keys of earlier steps", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moment_weight is not None and self.moment_weight <= 0:
            raise EditingError(f"editor setting 'moment_weight' is {self.moment_weight}; a positive number is needed.")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise EditingError(f"'layers' is {self.layers}; give each layer once, in ascending order.")


MEMITConfigT = TypeVar("MEMITConfigT", bound=MEMITConfig)


class ResidualSpreadingEditor(LocateThenEditEditor[MEMITConfigT]):
    """Targets at one layer whose residuals are spread over several layers; base of MEMIT and its variants.

    Attributes:
        num_default_layers: edited layers on models without a shipped configuration.
        measures_output: residuals are measured at the MLP output instead of the hidden state.
    """

    supports_joint = True
    num_default_layers: int = 5
    measures_output: bool = False

    def default_layers(self, model_config: Any) -> list[int]:
        """A run of blocks that ends at about a quarter of the depth, as in the published configurations."""
        last = round(0.27 * (num_layers(model_config) - 1))
        return list(range(max(0, last - self.num_default_layers + 1), last + 1))

    def ridge(self, constraint: Any, keys_UF: torch.Tensor, config: MEMITConfigT) -> float:
        """Ridge on the diagonal of K^T M K for one group of keys; lambda here."""
        if config.moment_weight is not None:
            return config.moment_weight
        # k^T C^-1 k averages f over the text behind C; for the identity it is the squared norm of the keys themselves.
        is_identity = constraint.matrix_FF is None
        typical = float(keys_UF.square().sum(1).mean()) if is_identity else keys_UF.shape[1]
        return typical * (1 / DEFAULT_WRITTEN_SHARE - 1)

    def compute(self, job: EditJob[MEMITConfigT]) -> list[Delta]:
        config = job.config
        through_norm = uses_norm(job.model, config)
        problems = self.problems(job)
        check_reach(job, problems, config.edited_layers[-1])
        values = self.optimize(job, problems, "mlp" if through_norm else "block")
        indices = range(len(job.requests))
        run = _Run(
            editor=self,
            model=job.model,
            config=config,
            rows=[list(rows) for rows, _ in problems],
            values=values,
            groups=[list(indices)] if job.joint else [[index] for index in indices],
            patched=job.joint or config.engine == "reference",
            history=job.history,
            through_norm=through_norm,
        )
        constraints = self.constraints(job.model)
        for index, layer in enumerate(config.edited_layers):
            run.write(index, layer, constraints[layer])
        return run.finish()

    def optimize(
        self, job: EditJob[MEMITConfigT], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        """Targets of all requests, as offsets at the last layer's ``site``."""
        layer = job.config.edited_layers[-1]
        terms = self.terms(job, forward_maker(job.model, job.config, layer, site))
        settings = value_settings(job.config, layer, site)
        return optimize_values(job.model, problems, settings, job.config.engine, progress=job.progress, terms=terms)

    def divisor(self, layers_left: int) -> float:
        """What the residual is divided by at a layer, which counts among those left."""
        return layers_left


class MEMIT(ResidualSpreadingEditor[MEMITConfig]):
    """Several layers, one or many requests at once."""

    name = "memit"
    config_class = MEMITConfig
    config_folders = ("memit",)
    contract_settings: ClassVar[Mapping[str, Any]] = MEMIT_CONTRACT_SETTINGS


def uses_norm(model: PreTrainedModel, config: MEMITConfig) -> bool:
    """Whether residuals are mapped through the norm behind the MLP.

    Raises:
        EditingError: when that is asked for and the blocks have no such norm.
    """
    has_norm = architecture_of(model).post_norm is not None
    if config.residual_mode == "normalized" and not has_norm:
        raise EditingError(
            f"residual_mode 'normalized' needs blocks that normalize the MLP output; {model.config.model_type} "
            "adds it as it is. Use 'auto' or 'faithful'."
        )
    return has_norm and config.residual_mode != "faithful"


def key_weights(num_templates: int) -> torch.Tensor:
    """Weights [N] of the key mean: one half for the bare prompt, one half shared by the other templates."""
    if num_templates == 1:
        return torch.ones(1, dtype=torch.float64)
    others = torch.full((num_templates - 1,), 0.5 / (num_templates - 1), dtype=torch.float64)
    return torch.cat([torch.tensor([0.5], dtype=torch.float64), others])


@dataclass
class _Run:
    """One call on its way through the layers; ``groups`` are the requests (by index) that share a delta."""

    editor: ResidualSpreadingEditor[Any]
    model: Any
    config: MEMITConfig
    rows: list[list[Row]]
    values: Sequence[OptimizedValue]
    groups: list[list[int]]
    patched: bool
    history: list[Delta]
    through_norm: bool

    def __post_init__(self) -> None:
        self.arch = architecture_of(self.model)
        self.deltas = [Delta() for _ in self.groups]
        self.group_of = {edit: number for number, group in enumerate(self.groups) for edit in group}
        self.target_ED: torch.Tensor | None = None
        self.start_ED: torch.Tensor | None = None

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, layers: Sequence[int]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], torch.Tensor]:
        """By layer the keys [E, f] and the bare prompts' MLP outputs [E, d], and h^L [E, d], under the edits so far."""
        reading = self._read_patched(layers) if self.patched else self._read_per_row(layers)
        weights_N = key_weights(len(self.rows[0])).to(reading.hidden_RD.device)
        shape = (len(self.rows), len(weights_N), -1)
        keys = {
            layer: torch.einsum("n,enf->ef", weights_N.to(keys_RF.dtype), keys_RF.view(shape))
            for layer, keys_RF in reading.keys_RF.items()
        }
        outputs = {layer: outputs_RD.view(shape)[:, 0] for layer, outputs_RD in reading.outputs_RD.items()}
        return keys, outputs, reading.hidden_RD.view(shape)[:, 0]

    def _read_per_row(self, layers: Sequence[int]) -> LayerActivations:
        flat = [row for rows in self.rows for row in rows]
        deltas = [self.deltas[self.group_of[edit]] for edit, rows in enumerate(self.rows) for _ in rows]
        return read_rows(self.model, flat, layers, self.config.edited_layers[-1], deltas if deltas[0].factors else None)

    def _read_patched(self, layers: Sequence[int]) -> LayerActivations:
        """Group by group, the group's delta in the weights."""
        parts = []
        for group, delta in zip(self.groups, self.deltas, strict=True):
            with edited(self.model, delta) if delta.factors else contextlib.nullcontext():
                flat = [row for edit in group for row in self.rows[edit]]
                parts.append(read_rows(self.model, flat, layers, self.config.edited_layers[-1]))
        return LayerActivations.concatenate(parts)  # groups are consecutive, so rows come out in the order of the edits

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, index: int, layer: int, constraint: Any) -> None:
        """Give every delta its factor at ``layer``, the ``index``-th of the edited ones."""
        keys, outputs, hidden_ED = self.read(sorted({layer, self.config.edited_layers[-1]}))
        keys_EF = keys[layer].double()
        current_ED = self._current(outputs, hidden_ED)
        if self.target_ED is None:
            self.start_ED = current_ED
            self.target_ED = self._targets(hidden_ED)
        share_ED = (self.target_ED - current_ED) / self.editor.divisor(len(self.config.edited_layers) - index)
        change_ED = share_ED
        if self.through_norm:
            norm = self.model.get_submodule(self.arch.post_norm_name(layer))
            outputs_ED = outputs[layer].double()
            change_ED = nearest_outputs(norm, outputs_ED, share_ED) - outputs_ED
        past_PF = self.past_keys(layer).to(keys_EF)
        applied_EF = constraint.metric_product(torch.cat([past_PF, keys_EF]))
        applied_past_PF, applied_EF = applied_EF[: len(past_PF)], applied_EF[len(past_PF) :]
        for group, delta in zip(self.groups, self.deltas, strict=True):
            ridge = self.editor.ridge(constraint, keys_EF[group], self.config)
            adjusted_UF = ridge_keys(
                torch.cat([past_PF, keys_EF[group]]), torch.cat([applied_past_PF, applied_EF[group]]), ridge
            )[len(past_PF) :]
            self._add(delta, layer, change_ED[group], adjusted_UF)
            written = (keys_EF[group] * adjusted_UF).sum(1).mean()  # s / (ridge + s) for a single edit
            self._note(delta, layer, {"written_share": float(written), **constraint.describe()})
            if self.config.keep_intermediates:
                delta.intermediates |= {
                    f"keys.layer{layer}": keys_EF[group],
                    f"adj_k.layer{layer}": adjusted_UF.T,
                    f"resid.layer{layer}": change_ED[group].T,
                }

    def _current(self, outputs: dict[int, torch.Tensor], hidden_ED: torch.Tensor) -> torch.Tensor:
        """Where the requests are [E, d], float64: h^L, or what the last layer's MLP output is or adds."""
        if not self.editor.measures_output:
            return hidden_ED.double()
        outputs_ED = outputs[self.config.edited_layers[-1]]
        return self._normalized(outputs_ED) if self.through_norm else outputs_ED.double()

    def _targets(self, hidden_ED: torch.Tensor) -> torch.Tensor:
        """z [E, d], float64: where they should go."""
        v0_ED = torch.stack([value.v0_D for value in self.values]).to(hidden_ED)
        wanted_ED = v0_ED.double() + torch.stack([value.delta_D for value in self.values]).to(hidden_ED).double()
        if not self.through_norm:
            return wanted_ED
        if self.editor.measures_output:
            return self._normalized(wanted_ED)
        return hidden_ED.double() + self._normalized(wanted_ED) - self._normalized(v0_ED)

    @torch.no_grad()
    def _normalized(self, outputs_ED: torch.Tensor) -> torch.Tensor:
        """What the last layer adds to the residual stream for MLP outputs [E, d], float64."""
        norm = self.model.get_submodule(self.arch.post_norm_name(self.config.edited_layers[-1]))
        where = next(norm.parameters()).device
        dtype = torch.promote_types(next(norm.parameters()).dtype, torch.float32)
        return norm(outputs_ED.to(where, dtype)).to(outputs_ED.device).double()

    def _add(self, delta: Delta, layer: int, change_UD: torch.Tensor, adjusted_UF: torch.Tensor) -> None:
        name = self.arch.rewrite_name(layer)
        module = self.model.get_submodule(name)
        dtype = torch.promote_types(linear_of(module).weight.dtype, torch.float32)  # type: ignore[arg-type]
        delta.factors[name] = Factor(change_UD.T.to(dtype), adjusted_UF.T.to(dtype), is_transposed(module))

    def _note(self, delta: Delta, layer: int, facts: dict[str, Any]) -> None:
        name = self.arch.rewrite_name(layer)
        factor = delta.factors[name]
        gram = (factor.left.T.double() @ factor.left.double()) * (factor.right.T.double() @ factor.right.double())
        ratio = float(gram.sum().clamp(min=0).sqrt()) / weight_norm(linear_of(self.model.get_submodule(name)))
        delta.diagnostics.setdefault("layers", []).append({"layer": layer, "update_norm_ratio": ratio, **facts})

    # --- streams ---------------------------------------------------------------------------------------------------

    def past_keys(self, layer: int) -> torch.Tensor:
        """Keys [P, f] of the earlier steps of the stream; none unless they are carried."""
        name = f"keys.layer{layer}"
        kept = (
            [delta.stream_state[name] for delta in self.history if name in delta.stream_state]
            if self.config.carry_keys
            else []
        )
        if kept:
            return torch.cat(kept, 1).T
        return torch.zeros(0, map_shape(self.model.get_submodule(self.arch.rewrite_name(layer)))[1])

    # --- results ---------------------------------------------------------------------------------------------------

    def finish(self) -> list[Delta]:
        """The deltas with diagnostics, and with the keys under the edit where later steps protect them."""
        keys, outputs, hidden_ED = self.read(self.config.edited_layers)
        assert self.target_ED is not None and self.start_ED is not None
        left_E = (self.target_ED - self._current(outputs, hidden_ED)).norm(dim=1)
        wanted_E = (self.target_ED - self.start_ED).norm(dim=1).clamp(min=1e-30)
        for group, delta in zip(self.groups, self.deltas, strict=True):
            self._diagnose(delta, group, (left_E / wanted_E)[group])
            if self.config.carry_keys:
                delta.stream_state |= {
                    f"keys.layer{layer}": keys[layer][group].T for layer in self.config.edited_layers
                }
            if self.config.keep_intermediates:
                delta.intermediates["z"] = self.target_ED[group]
                delta.intermediates["z_delta"] = torch.stack([self.values[index].delta_D for index in group])
        return self.deltas

    def _diagnose(self, delta: Delta, group: list[int], distance_U: torch.Tensor) -> None:
        records = [value_diagnostics(self.values[index]) for index in group]
        if len(group) == 1:
            delta.diagnostics |= {**records[0], "losses": self.values[group[0]].losses}
        else:
            delta.diagnostics |= _summary(records, [self.values[index] for index in group])
        layers = delta.diagnostics["layers"]
        delta.diagnostics |= {
            "constraint": layers[0]["constraint"],
            "update_norm_ratio": max(facts["update_norm_ratio"] for facts in layers),
            # 0: h^L went all the way to z; 1: it stayed; above 1: it overshot.
            "distance_left": float(distance_U.mean()),
            "residual_mode": "normalized" if self.through_norm else "faithful",
        }


def _summary(records: list[dict[str, Any]], values: Sequence[OptimizedValue]) -> dict[str, Any]:
    """Diagnostics of a joint batch: means over its requests, the spread of what matters, and the mean loss curve."""

    def mean(name: str) -> float:
        return sum(record[name] for record in records) / len(records)

    steps = max(len(value.losses) for value in values)
    curves = [[record["loss"] for record in value.losses] for value in values]
    padded = [curve + [curve[-1]] * (steps - len(curve)) for curve in curves]  # a stopped request keeps its loss
    losses = [{"loss": sum(column) / len(column)} for column in zip(*padded, strict=True)]
    return {
        "num_requests": len(records),
        "final_loss": losses[-1]["loss"],
        "final_loss_worst": max(record["final_loss"] for record in records),
        **{name: mean(name) for name in ("final_nll", "initial_nll", "delta_norm_ratio")},
        "steps": max(record["steps"] for record in records),
        "stop_reason": "loss" if all(record["stop_reason"] == "loss" for record in records) else "steps",
        "num_clamped": sum(record["clamped"] for record in records),
        "clamped": any(record["clamped"] for record in records),
        "losses": losses,
    }
