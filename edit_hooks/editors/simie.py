"""SimIE: a weight editor made sequential by regression on ideal edits.

The ideal editor makes every edit on the unedited weights W_0. The base editor therefore runs there for every step,
which gives W_e = W_0 + D. The sum A of what the stream has written so far (W = W_0 + A) is corrected only where the
keys of the new texts are. With K (tokens x f) the inputs of an edited map at all tokens of the step's texts, prompt and
target, and P = lambda I + sum K^T K over this and all earlier steps (recursive least squares),

    A <- A + (D - A) K^T K P^-1.

The keys are those of the unedited model, on which D acts. That is the paper's form, and the release's with its option
``--init_model`` (``base_weights: initial``). Without the option, the default of its command line, the base editor runs
on the weights written so far and the keys are read there (``running``):

    A <- A + D' K^T K P^-1,      D' the base editor's update of W_0 + A.

A step of several requests is written request by request, as released (``joint_steps: one_by_one``),
or from one joint edit of the base editor (``together``). As released, the recursion covers every map that the base
editor can change: a step whose edit leaves a map alone (KN chooses its blocks by the fact) has D = 0 there, so it adds
its keys to P and corrects A. K P^-1 is solved in float64 through the smaller of two
systems: f x f, or of the number of tokens seen so far (Woodbury). The update is thus a factor with one column per
token. The keys are stored in ``Delta.stream_state``. While the base editor works, the earlier steps' deltas are
subtracted from the weights, which gives W_0 up to one rounding of the weights.

lambda is absolute on the scale of squared key norms. ``written_share`` in the diagnostics is the part of D that a first
step would write at its own tokens. lambda has three sources: 1e4 in EasyEdit's files (with ROME as the base), the
default here; 10 in the example of the release's README (MEMIT on Llama 2); 1 in its command line.

Shapes: T tokens of a step, S tokens of earlier steps, N = S + T, f and d input and output width of a map.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.architectures import input_device, is_transposed, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks, on_input
from edit_hooks.modeling.tokens import encode, split_continuation
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE

STATE_PREFIX = "simie/keys/"  # of the keys in saved edits


@dataclass(kw_only=True)
class SimIEConfig(WrapperConfig):
    """The base editor, the ridge, and the form of the recursion."""

    base: str = config_field("name of the editor that is made sequential", default="rome")
    ridge: float = config_field(
        "lambda, the weight of the identity in P; the default is that of EasyEdit's files, the release's command line "
        "has 1, the example in its README 10",
        within=POSITIVE,
        default=1e4,
    )
    base_weights: Literal["initial", "running"] = config_field(
        "weights on which the base editor runs and keys are read; initial: the unedited ones (paper), running: those "
        "written so far",
        default="initial",
    )
    joint_steps: Literal["one_by_one", "together"] = config_field(
        "a step of several requests; one_by_one: a step each (released), together: one joint edit of the base editor",
        default="one_by_one",
    )


class SimIE(PostProcessingEditor[SimIEConfig]):
    """A base editor made sequential by recursive least squares."""

    name = "simie"
    config_class = SimIEConfig
    config_folders = ("simie",)
    stream_growth = StreamGrowth("keys and updates of each step", "with edits")
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": {**MEMIT_CONTRACT_SETTINGS, "fact_token": "last"},
        "ridge": 0.1,
    }

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        """Keys are read at the target's last token, too."""
        whole = len(encode(tokenizer, request.text + request.continuation).ids)
        return {**super().other_lengths(tokenizer, request, model), "prompt and the whole target_new": whole}

    def compute(self, job: EditJob[SimIEConfig]) -> list[Delta]:
        if not job.joint or job.config.joint_steps == "together":
            return self._steps(job, job.requests, job.history, job.joint)
        steps: list[Delta] = []
        with contextlib.ExitStack() as applied:
            for request in job.requests:
                steps += self._steps(job, [request], [*job.history, *steps], joint=False)
                applied.enter_context(edited(job.model, steps[-1]))
        return [concatenated(job.model, steps)]

    def _steps(
        self, job: EditJob[SimIEConfig], requests: Sequence[EditRequest], history: Sequence[Delta], joint: bool
    ) -> list[Delta]:
        """The updates after ``history``, which is in the weights: one per request, or a joint one."""
        model, config = job.model, job.config
        groups = [list(requests)] if joint else [[request] for request in requests]
        starts_over = config.base_weights == "initial" and bool(history)
        with edited(model, _negated_sum(history)) if starts_over else contextlib.nullcontext():
            ideals = self.base.edit(model, job.tokenizer, requests, joint=joint, progress=job.progress, measure=False)
            keys = [
                _read_keys(model, job.tokenizer, group, self._maps(job, ideal, history))
                for group, ideal in zip(groups, ideals, strict=True)
            ]
        return [
            _combine(model, ideal, keys_of_group, history, config)
            for ideal, keys_of_group in zip(ideals, keys, strict=True)
        ]

    def _maps(self, job: EditJob[SimIEConfig], ideal: Delta, history: Sequence[Delta]) -> list[str]:
        """Names of the maps of the recursion: those that the base editor can change, changes now, or has changed."""
        possible = self.base.target_modules(self.base.resolve_config(job.model, job.tokenizer), job.model)
        return list(dict.fromkeys([*possible, *_edited_maps(ideal), *_maps_of_stream(history)]))


@torch.no_grad()
def _combine(
    model: nn.Module, ideal: Delta, keys: dict[str, torch.Tensor], history: Sequence[Delta], config: SimIEConfig
) -> Delta:
    """The update of a step, from the base editor's delta and the keys [T, f] by map."""
    ridge, ideal = config.ridge, beside_weights(model, ideal)
    delta = Delta(
        warnings=ideal.warnings, diagnostics=ideal.diagnostics, meta=ideal.meta, intermediates=ideal.intermediates
    )
    shares = {}
    for name, keys_TF in keys.items():
        module = model.get_submodule(name)
        transposed = is_transposed(module)
        dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
        delta.stream_state[f"{STATE_PREFIX}{name}"] = keys_TF.to(dtype)
        outputs = [output_change(ideal, name, transposed, keys_TF)] if _changes(ideal, name) else []
        if outputs:
            written_TD = (keys_TF @ solve_keys(keys_TF, keys_TF[:0], ridge).T) @ outputs[0]
            shares[name] = float(written_TD.norm() / outputs[0].norm().clamp(min=1e-30))
        if config.base_weights == "initial":
            outputs += [-output_change(step, name, transposed, keys_TF) for step in history if _changes(step, name)]
        if not outputs:
            continue  # D and A are zero
        left_TD = functools.reduce(torch.add, outputs)  # (D - A) K^T, transposed
        right_TF = solve_keys(keys_TF, _past_keys(history, name, keys_TF), ridge)
        delta.factors[name] = Factor(left_TD.T.to(dtype), right_TF.T.to(dtype), transposed)
    delta.diagnostics["simie"] = {"written_share": shares}
    delta.diagnostics["update_norm_ratio"] = largest_norm_ratio(model, delta)
    return delta


def concatenated(model: nn.Module, steps: Sequence[Delta]) -> Delta:
    """The sum of consecutive steps, with the keys of all."""
    total = Delta()
    for name in dict.fromkeys(name for step in steps for name in step.factors):
        factors = [step.factors[name] for step in steps if name in step.factors]
        left, right = (torch.cat([getattr(one, side) for one in factors], 1) for side in ("left", "right"))
        total.factors[name] = factors[0]._replace(left=left, right=right)
    for name in dict.fromkeys(name for step in steps for name in step.stream_state):
        total.stream_state[name] = torch.cat([step.stream_state[name] for step in steps if name in step.stream_state])
    total.diagnostics = {
        "requests": [step.report().to_json() for step in steps],
        "update_norm_ratio": largest_norm_ratio(model, total),
    }
    return total


def solve_keys(keys_TF: torch.Tensor, past_SF: torch.Tensor, ridge: float) -> torch.Tensor:
    """Rows of K P^-1 [T, f], float64.

    P = ridge I + X^T X, where X are the past and the new keys.
    """
    all_NF = torch.cat([past_SF, keys_TF])
    num_keys, width = all_NF.shape
    if num_keys >= width:
        system_FF = all_NF.T @ all_NF + ridge * torch.eye(width, dtype=all_NF.dtype, device=all_NF.device)
        return torch.cholesky_solve(keys_TF.T, torch.linalg.cholesky(system_FF)).T
    # (ridge I + X^T X)^-1 X^T = X^T (ridge I + X X^T)^-1, of which the last columns belong to the new keys.
    system_NN = all_NF @ all_NF.T + ridge * torch.eye(num_keys, dtype=all_NF.dtype, device=all_NF.device)
    columns_NT = torch.eye(num_keys, dtype=all_NF.dtype, device=all_NF.device)[:, num_keys - len(keys_TF) :]
    return torch.cholesky_solve(columns_NT, torch.linalg.cholesky(system_NN)).T @ all_NF


def _negated_sum(history: Sequence[Delta]) -> Delta:
    """The delta that subtracts the steps of a stream from the weights."""
    total: dict[str, torch.Tensor] = {}
    for delta in history:
        for name, update in delta.weights().items():
            total[name] = total[name] - update if name in total else -update
    return Delta(dense=total)


def _edited_maps(ideal: Delta) -> list[str]:
    """Names of the linear maps that a delta changes.

    Raises:
        EditingError: the delta changes other parameters.
    """
    names = []
    for parameter, update in ideal.weights().items():
        module, _, leaf = parameter.rpartition(".")
        if leaf != "weight" or update.dim() != 2:
            raise EditingError(
                f"the base editor changes {parameter}; SimIE is defined for the weights of linear maps. Switch it "
                "off in base_settings (ft_m: train_bias: false), or choose another base."
            )
        names.append(module)
    return names


@torch.no_grad()
def _read_keys(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Inputs of the maps at all tokens of the requests' texts, float64 [T, f] by map."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def record_input(name: str) -> Registration:
        return on_input(model.get_submodule(name), lambda hidden: parts[name].append(hidden[0].double()))

    with frozen(model), hooks(*map(record_input, names)):
        for request in requests:
            prompt, target = split_continuation(tokenizer, request.text, request.continuation)
            model(input_ids=torch.tensor([prompt + target], device=input_device(model)), use_cache=False)
    return {name: torch.cat(keys) for name, keys in parts.items()}


def _maps_of_stream(history: Sequence[Delta]) -> list[str]:
    """Names of the maps whose keys the earlier steps have stored.

    Raises:
        EditingError: a step has stored none.
    """
    names = []
    for delta in history:
        stored = [key.removeprefix(STATE_PREFIX) for key in delta.stream_state if key.startswith(STATE_PREFIX)]
        if not stored:
            raise EditingError("a delta of the history was not made by SimIE; a stream has one editor throughout.")
        names += stored
    return names


def _past_keys(history: Sequence[Delta], name: str, like: torch.Tensor) -> torch.Tensor:
    """Keys [S, f] of the earlier steps at one map."""
    key = f"{STATE_PREFIX}{name}"
    parts = [delta.stream_state[key].to(like) for delta in history if key in delta.stream_state]
    return torch.cat([like[:0], *parts])


def _changes(delta: Delta, name: str) -> bool:
    """Whether a delta changes a map."""
    return f"{name}.weight" in delta.parameter_names


def output_change(delta: Delta, name: str, transposed: bool, keys_TF: torch.Tensor) -> torch.Tensor:
    """Change of a map's outputs for keys under a delta, float64 [T, d].

    Args:
        transposed: whether the map stores its weight as [f, d].
    """
    if name in delta.factors and name not in delta.masks:
        factor = delta.factors[name]
        return (keys_TF @ factor.right.to(keys_TF)) @ factor.left.to(keys_TF).T
    update = delta.weights()[f"{name}.weight"].to(keys_TF)
    return keys_TF @ (update if transposed else update.T)
