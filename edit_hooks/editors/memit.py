"""MEMIT: batches of edits written into several layers.

Method of "Mass-Editing Memory in a Transformer".

Write W_l for the rewrite module of layer l as a map R^f -> R^d, h^L for the output of the last edited block and
C_l = E[k k^T] for the second moment of keys over ordinary text. With u requests and layers l_1 < ... < l_n = L:

1. Targets: z_e = h^L + delta_e, optimized at the output of block L for every request on the unedited weights.
2. For i = 0 .. n-1, with the updates of earlier layers in place: keys K (f x u; half the bare prompt's key, half the
   mean over the other context templates), hidden states H (d x u) of the bare prompts, and (eq. 14, 19 and 20)

       R = (Z - H) / (n - i),   A = (lambda C + K K^T)^-1 K,   W <- W + R A^T.

The f x f system is solved in its exact u x u form in float64, A = C^-1 K (lambda I + K^T C^-1 K)^-1. Independent edits
(u = 1 each) pass through the layers together, every row under its own rank-one updates. A joint batch is written into
the weights while the next layer is read.

Variants override these steps: ``load_constraints`` (the metric in place of C^-1), :meth:`ResidualSpreadingEditor.ridge`
(the value in place of lambda), :meth:`~ResidualSpreadingEditor.optimize` (the targets),
:meth:`~ResidualSpreadingEditor.divisor` (n - i) and ``measures_output`` (target and residual are outputs of the last
layer's MLP instead of h^L).

k^T C^-1 k averages f over the text behind C, so a request writes about f / (lambda + f) of each layer's share. Without
a ``moment_weight``, lambda is chosen so that this is four fifths.

Blocks that normalize the MLP output before adding it (Gemma 2 and 3, OLMo 2) overshoot under step 2. For them the
default is ``residual_mode: normalized``: the offset is optimized at the MLP output m of layer L, where every value is
reachable, z = h^L + n(m + delta) - n(m), and each layer's share of the residual becomes the MLP output whose norm is
nearest to the wanted contribution (:mod:`edit_hooks.locate.values.post_norm`). ``faithful`` is the released algorithm
on every model.

With ``carry_keys`` the keys K_p of earlier steps of a stream join the system, lambda C + K_p K_p^T + K K^T
("MEMIT_seq" of the AlphaEdit release). They are read with the step's edits in place and stored in
``Delta.stream_state``. From f / 2 keys on, memory and time per step stay constant
(:mod:`edit_hooks.locate.streams.carried_keys`). A fact that is edited again counts twice in the system, so that at most
half of its new residual is written. ``stream: exact`` corrects and deletes facts exactly, and leaves the weights of one
joint edit at every step (:mod:`edit_hooks.locate.streams.exact`).

Shapes: E requests of the call, U requests of one delta, N context templates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import FLOAT64, Footprint, StreamGrowth, low_rank_bytes, passes
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import on_cpu
from edit_hooks.locate.answer_windows import ANSWER_TOKENS
from edit_hooks.locate.context_templates import BARE
from edit_hooks.locate.editor import SECOND_MOMENTS_HELP, LocateThenEditConfig, LocateThenEditEditor
from edit_hooks.locate.layerwise_update import LayerwiseUpdate, uses_norm
from edit_hooks.locate.moments.solve import KeyMetric, SecondMoment
from edit_hooks.locate.streams.carried_keys import FACTS, CarriedKeys, fact_of, key_name
from edit_hooks.locate.streams.exact import NEEDS_ONE_LAYER, EditedMatrix, ExactStream
from edit_hooks.locate.text_states import StatedText, write_by_keys
from edit_hooks.locate.value_editor import (
    MEMIT_CONTRACT_SETTINGS,
    MEMITValueConfig,
    check_reach,
    forward_maker,
    value_settings,
)
from edit_hooks.locate.values.key_reader import mean_keys, read_rows
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_batch import Site, ValueProblem
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.locate.values.value_steps import OptimizedValue
from edit_hooks.modeling.architectures import (
    architecture_of,
    map_shape,
    num_layers,
    unwrapped,
)
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE

DEFAULT_WRITTEN_SHARE = 0.8
REPEATED_FACT_WARNING = (
    "a fact is edited again in a stream that carries keys: its key counts twice in the system, as in the release, so "
    "at most half of the correction is written (written_share) and the rest is the old target. stream=exact, with one "
    "layer, corrects it whole; carry_keys=false does, too, and protects no earlier edit."
)


@dataclass(kw_only=True)
class MEMITConfig(MEMITValueConfig, LocateThenEditConfig):
    """Settings of MEMIT and its variants."""

    second_moments: Any = config_field(SECOND_MOMENTS_HELP, default="self")
    moment_weight: float | None = config_field(
        "lambda, the weight of C; null: a quarter of the key width, which writes four fifths of a residual",
        within=POSITIVE,
        default=None,
    )
    residual_mode: Literal["auto", "faithful", "normalized"] = config_field(
        "conversion of a residual into an MLP output; auto: normalized where the block normalizes its MLP output, else "
        "faithful",
        default="auto",
    )
    carry_keys: bool = config_field("in a stream, protect the keys of earlier steps", default=False)
    stream: Literal["released", "exact"] = config_field(
        "steps of a stream; released: each is made on the edited model; exact: each leaves the weights of one joint "
        "edit of all facts so far, a fact that is edited again is corrected, and facts can be deleted (one layer)",
        default="released",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise EditingError(f"'layers' is {self.layers}; give each layer once, in ascending order.")
        if self.stream == "exact":
            self.require_one_layer(NEEDS_ONE_LAYER)


MEMITConfigT = TypeVar("MEMITConfigT", bound=MEMITConfig)


class ResidualSpreadingEditor(LocateThenEditEditor[MEMITConfigT]):
    """Residuals of one layer spread over several; base of MEMIT and its variants.

    Attributes:
        states_settings: a stream of given states carries nothing, as released, and reads no context templates.
        num_default_layers: edited layers on models without a shipped configuration.
        measures_output: residuals are measured at the MLP output instead of the hidden state.
    """

    supports_joint = True
    num_default_layers: int = 5
    measures_output: bool = False
    stream_growth = StreamGrowth("nothing; with carry_keys as alphaedit", "no")
    states_settings: ClassVar[Settings] = {"context_templates": [BARE], "carry_keys": False, "stream": "released"}

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self.reads_past_updates = self.config_class.from_mapping(self.overrides).stream == "exact"

    def default_config(self, model: nn.Module) -> MEMITConfigT:
        config = super().default_config(model)
        if config.stream == "exact":
            config.require_one_layer(NEEDS_ONE_LAYER)
        return config

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        """Consecutive blocks up to about a quarter of the depth, as published."""
        last = round(0.27 * (num_layers(model_config) - 1))
        return list(range(max(0, last - self.num_default_layers + 1), last + 1))

    def ridge(self, metric: KeyMetric, keys_UF: torch.Tensor, config: MEMITConfigT) -> float:
        """Hook: ridge on the diagonal of K^T M K; lambda for MEMIT.

        ``keys_UF`` are the keys of one delta.
        """
        if config.moment_weight is not None:
            return config.moment_weight
        # k^T C^-1 k averages f over the text behind C; for the identity it is the squared norm of the keys themselves.
        is_identity = isinstance(metric, SecondMoment) and metric.matrix_FF is None
        typical = float(keys_UF.square().sum(1).mean()) if is_identity else keys_UF.shape[1]
        return typical * (1 / DEFAULT_WRITTEN_SHARE - 1)

    def compute(self, job: EditJob[MEMITConfigT]) -> list[Delta]:
        through_norm = uses_norm(job.model, job.config.residual_mode)
        problems = self.problems(job)
        check_reach(job, problems, self.target_layer(job.config))
        exact = self.exact_stream(job.model, job.config, job.history) if job.config.stream == "exact" else None
        with exact.unedited(job.model) if exact else contextlib.nullcontext():
            values = self.optimize(job, problems, "mlp" if through_norm else "block")
            update = self.layerwise_update(job, [list(rows) for rows, _ in problems], values, through_norm)
            for index, layer in enumerate(job.config.edited_layers):
                update.write(index, layer, self.metric(job, layer), exact)
        return update.finish()

    # -- streams -------------------------------------------------------------------------------------------------------

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        inner = unwrapped(model)
        config = self._resolved[inner]
        if config.stream == "exact":
            return [self.exact_stream(inner, config, history).condensed()] if history else []
        if not config.carry_keys:
            return []
        state: dict[str, torch.Tensor] = {}
        for layer in config.edited_layers:
            state |= self.carried_keys(inner, config, history, layer).state(layer)
        facts = [fact for delta in history for fact in delta.meta.get(FACTS, ())]
        return [Delta(stream_state=state, meta={FACTS: facts})] if state else []

    def most_state_bytes(self, model: nn.Module) -> int | None:
        inner = unwrapped(model)
        config = self._resolved[inner]
        if config.stream == "exact":
            return None  # a residual per fact
        return FLOAT64 * sum(self._squares(config, inner)) if config.carry_keys else 0

    def carried_keys(self, model: nn.Module, config: MEMITConfigT, history: Sequence[Delta], layer: int) -> CarriedKeys:
        """The keys of a layer that the steps of a stream left; none without ``carry_keys``."""
        metric = self.constraints(model)[layer]
        width = map_shape(model.get_submodule(architecture_of(model).rewrite_name(layer)))[1]
        steps = history if config.carry_keys else ()
        return CarriedKeys.after(steps, layer, width, metric, lambda keys_UF: self.ridge(metric, keys_UF, config))

    def exact_stream(self, model: nn.Module, config: MEMITConfigT, history: Sequence[Delta]) -> ExactStream:
        """The state of a stream under ``stream: exact``.

        Raises:
            EditingError: the ridge depends on the keys of a step.
        """
        (layer,) = config.edited_layers
        metric, name = self.constraints(model)[layer], architecture_of(model).rewrite_name(layer)
        matrix = EditedMatrix(layer, name, model.get_submodule(name))
        one_UF = torch.ones(1, map_shape(matrix.module)[1], dtype=torch.float64)
        ridges = {self.ridge(metric, keys_UF, config) for keys_UF in (one_UF, 2 * one_UF.expand(2, -1))}
        start = ExactStream.start(matrix, metric, ridges.pop() if len(ridges) == 1 else None)
        return start.after(history)

    @torch.no_grad()
    def remove(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        history: Sequence[Delta],
    ) -> Delta:
        """Compute the delta that deletes facts of a stream, exactly as if they had never been written.

        Subtracting the delta of a fact's own step is not the same: later steps were solved in its presence.

        Args:
            requests: facts by prompt and subject; their targets play no role.
            history: all steps so far, applied to the weights.

        Raises:
            EditingError: without ``stream: exact``, and for facts that the stream does not have.
        """
        inner = unwrapped(model)
        config = self.resolve_config(inner, tokenizer)
        if config.stream != "exact":
            raise EditingError(
                "facts can be removed from a stream that was made with stream=exact; elsewhere only whole steps can be "
                "undone, by applying the others alone."
            )
        (layer,) = config.edited_layers
        job = EditJob(inner, tokenizer, config, list(requests), True, list(history), lambda count: None)
        exact = self.exact_stream(inner, config, history)
        rows = [list(rows) for rows, _ in self.problems(job)]
        with exact.unedited(inner):
            activations = read_rows(inner, [row for of_request in rows for row in of_request], [layer], layer)
        delta = exact.matrix.delta(exact.removal(mean_keys(activations.keys_RF[layer], len(rows)).double(), requests))
        delta.meta = {"editor": self.name, "config": config.to_dict(), "requests": []}
        delta.meta["removed"] = [request.to_dict() for request in requests]
        delta.stream_state = on_cpu(delta.stream_state)
        return delta

    def state_of_keys(self, job: EditJob[MEMITConfigT], layer: int, keys_UF: torch.Tensor) -> dict[str, torch.Tensor]:
        """Hook: what a released stream with ``carry_keys`` stores of the keys of one step, for later steps."""
        return {key_name(layer): keys_UF.T}

    # -- hooks of variants ---------------------------------------------------------------------------------------------

    def warnings(self, job: EditJob[MEMITConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        warnings = super().warnings(job, requests, delta)
        if job.config.carry_keys and job.config.stream == "released":
            facts = [fact_of(request) for request in requests]
            own = set(facts)  # no set of the earlier ones, of which there can be many thousand
            if len(own) < len(facts) or not all(own.isdisjoint(step.meta.get(FACTS, ())) for step in job.history):
                warnings.append(REPEATED_FACT_WARNING)
        return warnings

    def optimize(
        self, job: EditJob[MEMITConfigT], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        """Hook: targets of all requests, as offsets at the ``site`` of the layer of the targets."""
        layer = self.target_layer(job.config)
        terms = self.terms(job, forward_maker(job.model, job.config, layer, site))
        settings = value_settings(job.config, layer, site)
        return optimize_values(job.model, problems, settings, job.config.engine, progress=job.progress, terms=terms)

    def metric(self, job: EditJob[MEMITConfigT], layer: int) -> KeyMetric:
        """Hook: the constraint of a layer in this step of a stream."""
        return self.constraints(job.model)[layer]

    def layerwise_update(
        self,
        job: EditJob[MEMITConfigT],
        rows: list[list[TokenRow]],
        values: Sequence[OptimizedValue],
        through_norm: bool,
    ) -> LayerwiseUpdate:
        """Hook: how the layers are read and written."""
        return LayerwiseUpdate(self, job, rows, values, through_norm)

    def divisor(self, layers_left: int) -> float:
        """Hook: divisor of the residual at a layer; ``layers_left`` includes that layer."""
        return layers_left

    # -- states made by another editor ---------------------------------------------------------------------------------

    def write_states(self, job: EditJob[MEMITConfigT], texts: Sequence[StatedText]) -> list[Delta]:
        return write_by_keys(self, job, texts)

    def states_footprint(self, config: MEMITConfigT, model: nn.Module) -> Footprint:
        """A pass of the text per layer, the solve, and an update of the rank of its windows, here one."""
        names, layers = self.target_modules(config, model), config.edited_layers
        reading = passes(model, first=0, rows=1, tokens=ANSWER_TOKENS, steps=len(layers), backward=False)
        return Footprint(
            solve=self.solve_bytes(config, model),
            statistics=self.statistics_bytes(config, model),
            update=low_rank_bytes(model, names, 1),
            work=reading,
        )


class MEMIT(ResidualSpreadingEditor[MEMITConfig]):
    """Closed-form updates of several layers, for one or many requests at once."""

    name = "memit"
    config_class = MEMITConfig
    writes_states = True
    config_folders = ("memit",)
    contract_settings: ClassVar[Settings] = MEMIT_CONTRACT_SETTINGS
