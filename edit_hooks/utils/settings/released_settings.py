"""Settings files of EasyEdit and of the releases of ROME and MEMIT, whose names differ: recognized and translated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from edit_hooks.utils.settings.options import has_text_form, inline_settings

# Only such files have these keys.
MARKS = ("alg_name", "rewrite_module_tmp", "inner_params", "layer_module_tmp")
OF_A_RUN = ("seed", "engine")  # that options of a run put beside them
# Name there -> name here, where an editor has a setting of that name. Settings with one name in both need no entry.
NAMES = {
    "v_num_grad_steps": "num_steps",
    "v_lr": "lr",
    "v_weight_decay": "weight_decay",
    "clamp_norm_factor": "clamp_factor",
    "mom2_update_weight": "moment_weight",
    "nll_loss_factor": "nll_factor",
    "L2": "l2",
    "n_iter": "num_steps",
    "edit_lr": "lr",
    "eps": "radius",
    "optim_num_step": "fit_steps",
    "window_size": "window",
}
# Of files that have a rate of the value optimization beside it, as those of UnKE and AnyEdit.
BESIDE_V_LR = {"lr": "fit_lr"}

# Numbers for which these files have `false` if they are not set.
OFF: Mapping[str, Any] = {"norm_constraint": None, "weight_decay": 0.0}


def is_released(settings: Mapping[str, Any]) -> bool:
    """Whether a mapping has the keys of such a file."""
    return any(mark in settings for mark in MARKS)


def translate(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings under the names used here, as far as an editor with the settings ``known`` has them."""
    names = NAMES | (BESIDE_V_LR if "v_lr" in settings else {})
    translated = {names.get(name, name): _number(value) for name, value in settings.items() if name not in OF_A_RUN}
    translated |= {name: OFF[name] for name, value in translated.items() if value is False and name in OFF}
    if isinstance(adjusted := settings.get("mom2_adjustment"), bool):
        translated["second_moments"] = "published" if adjusted else None
    return {name: value for name, value in translated.items() if name in known and has_text_form(value)}


def explain(settings: Mapping[str, Any], known: Collection[str]) -> str:
    """The error about such settings: the same ones in the names used here, and those without a counterpart."""
    ours = translate(settings, known)
    method = f" (alg_name: {settings['alg_name']})" if "alg_name" in settings else ""
    done = {"alg_name", *OF_A_RUN, *ours, *(theirs for theirs, name in NAMES.items() if name in ours)}
    rest = [name for name in settings if name not in done]
    return (
        f"these settings have the names of EasyEdit's files{method}, which differ. In the names of this editor: "
        f"editor_args={inline_settings(ours)}\n"
        "(or each as a line 'name: value' of a YAML file). The others are read from the model or have no counterpart: "
        f"{', '.join(rest)}."
    )


def _number(value: Any) -> Any:
    """YAML reads 5e-4 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
