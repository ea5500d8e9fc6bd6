"""SimIE: makes any weight editor sequential by regression on the edits an ideal editor would make.

The ideal editor makes every edit on the unedited weights W_0. So the base editor is run there for every step, giving
W_e = W_0 + D, and what a stream has written so far, A (W = W_0 + A), is corrected only where the keys of the new texts
are. With K (tokens x f) the inputs of an edited map at all tokens of the step's texts, prompt and target, and
P = lambda I + sum K^T K over this and all earlier steps (recursive least squares),

    A <- A + (D - A) K^T K P^-1.

The keys are those of the unedited model, on which D acts. K P^-1 is solved in float64 through the smaller of two
systems, f x f or as large as the tokens seen so far (Woodbury), so the update is a factor with one column per token.
The keys travel in ``Delta.stream_state``; earlier steps' deltas are taken off the weights while the base editor works,
which
leaves W_0 up to one rounding of the weights.

lambda is absolute beside squared key norms: ``written_share``, the part of D that a first step would write at its own
tokens, is in the diagnostics. The released files use ROME as the base and lambda = 1e4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.base.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.locate.editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.architectures import input_device, is_transposed, weight_of
from edit_hooks.modeling.hooks import frozen, hooks, on_input
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

CARRY = "simie/keys/"


@dataclass(kw_only=True)
class SimIEConfig(WrapperConfig):
    """The ridge; the released files use ROME as the base."""

    base: str = config_field("the editor that is made sequential", default="rome")
    ridge: float = config_field("lambda, what P starts from", default=1e4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ridge <= 0:
            raise EditingError(f"editor setting 'ridge' is {self.ridge}; a positive number is needed.")


class SimIE(PostProcessingEditor[SimIEConfig]):
    """A base editor's edits, each made on the unedited weights, joined by recursive least squares."""

    name = "simie"
    config_class = SimIEConfig
    config_folders = ("simie",)
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": {**MEMIT_CONTRACT_SETTINGS, "fact_token": "last"},
        "ridge": 0.1,
    }

    def compute(self, job: EditJob[SimIEConfig]) -> list[Delta]:
        with edited(job.model, _negated(job.history)) if job.history else contextlib.nullcontext():
            ideals = self.base.edit(job.model, job.tokenizer, job.requests, joint=job.joint, progress=job.progress)
            names = [_maps_of(ideal) for ideal in ideals]
            keys = [_keys(job.model, job.tokenizer, group, own) for group, own in zip(job.groups, names, strict=True)]
        return [
            self._joined(job.model, ideal, own, job.history, job.config)
            for ideal, own in zip(ideals, keys, strict=True)
        ]

    @torch.no_grad()
    def _joined(
        self,
        model: nn.Module,
        ideal: Delta,
        keys: dict[str, torch.Tensor],
        history: Sequence[Delta],
        config: SimIEConfig,
    ) -> Delta:
        """The step's own update from the base editor's delta and the texts' keys [T, f] by map."""
        out = Delta(diagnostics=ideal.diagnostics, meta=ideal.meta, intermediates=ideal.intermediates)
        shares = {}
        for name, keys_TF in keys.items():
            past_SF = _past_keys(history, name, keys_TF)
            right_TF = solved_keys(keys_TF, past_SF, config.ridge)
            wanted_TD = _acts(ideal, name, keys_TF)
            left_TD = wanted_TD.clone()
            for step in history:
                left_TD -= _acts(step, name, keys_TF)
            module = model.get_submodule(name)
            dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
            out.factors[name] = Factor(left_TD.T.to(dtype), right_TF.T.to(dtype), is_transposed(module))
            out.stream_state[f"{CARRY}{name}"] = keys_TF.to(dtype)
            # How much of what the ideal edit adds at these tokens a first step would add.
            written_TD = (keys_TF @ solved_keys(keys_TF, keys_TF[:0], config.ridge).T) @ wanted_TD
            shares[name] = float(written_TD.norm() / wanted_TD.norm().clamp(min=1e-30))
        out.diagnostics["simie"] = {"written_share": shares}
        out.diagnostics["update_norm_ratio"] = largest_norm_ratio(model, out)
        return out


def _negated(history: Sequence[Delta]) -> Delta:
    """What takes the steps of a stream off the weights again."""
    total: dict[str, torch.Tensor] = {}
    for delta in history:
        for name, update in delta.weights().items():
            total[name] = total[name] - update if name in total else -update
    return Delta(dense=total)


def _maps_of(ideal: Delta) -> list[str]:
    """The linear maps a delta changes.

    Raises:
        EditingError: for a delta that changes anything else.
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
def _keys(
    model: Any, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Inputs of the maps at all tokens of the requests' texts, float64 [T, f] by map."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def keep(name: str) -> Any:
        def read(hidden: torch.Tensor) -> None:
            found[name].append(hidden[0].double())

        return read

    with frozen(model), hooks(*(on_input(model.get_submodule(name), keep(name)) for name in names)):
        for request in requests:
            prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
            model(input_ids=torch.tensor([prompt + target], device=input_device(model)), use_cache=False)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _past_keys(history: Sequence[Delta], name: str, like: torch.Tensor) -> torch.Tensor:
    """Keys [S, f] of the earlier steps at one map."""
    parts = [like[:0]]
    for delta in history:
        if not any(key.startswith(CARRY) for key in delta.stream_state):
            raise EditingError("a delta of the history was not made by SimIE; a stream has one editor throughout.")
        if f"{CARRY}{name}" in delta.stream_state:
            parts.append(delta.stream_state[f"{CARRY}{name}"].to(like))
    return torch.cat(parts)


def solved_keys(keys_TF: torch.Tensor, past_SF: torch.Tensor, ridge: float) -> torch.Tensor:
    """Rows of K P^-1 [T, f] with P = ridge I + all^T all over past and new keys, which are rows of float64."""
    all_NF = torch.cat([past_SF, keys_TF])
    num_keys, width = all_NF.shape
    if num_keys >= width:
        system_FF = all_NF.T @ all_NF + ridge * torch.eye(width, dtype=all_NF.dtype, device=all_NF.device)
        return torch.cholesky_solve(keys_TF.T, torch.linalg.cholesky(system_FF)).T
    # (ridge I + X^T X)^-1 X^T = X^T (ridge I + X X^T)^-1, of which the last columns belong to the new keys.
    system_NN = all_NF @ all_NF.T + ridge * torch.eye(num_keys, dtype=all_NF.dtype, device=all_NF.device)
    columns_NT = torch.eye(num_keys, dtype=all_NF.dtype, device=all_NF.device)[:, num_keys - len(keys_TF) :]
    return torch.cholesky_solve(columns_NT, torch.linalg.cholesky(system_NN)).T @ all_NF


def _acts(delta: Delta, name: str, keys_TF: torch.Tensor) -> torch.Tensor:
    """What a delta adds to a map's outputs for keys: [T, d], float64."""
    if name in delta.factors and name not in delta.masks:
        factor = delta.factors[name]
        return (keys_TF @ factor.right.to(keys_TF)) @ factor.left.to(keys_TF).T
    update = delta.weights()[f"{name}.weight"].to(keys_TF)
    return keys_TF @ (update if update.shape[0] == keys_TF.shape[1] else update.T)
