"""PEFT's rules for reading a LoRA adapter's configuration: scalings, targets, and what is more than a low-rank update.

Written after peft (``get_pattern_key``, ``check_target_module_exists``), so that reading an adapter does not need it;
tests compare every rule with peft's own merged weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from edit_hooks.deltas.schema import (
    Record,
    either,
    flag,
    list_of,
    mapping_of,
    nullable,
    number,
    of_file,
    require_shallow,
    text,
    whole,
)
from edit_hooks.modeling.architectures import head_of, linear_of, unwrapped
from edit_hooks.modeling.linear_maps import is_linear_map
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.text.expressions import compiled

# Fields that do not change what the tensors stand for -> why. Any other field with a value that is not empty, none or
# false makes an adapter more than a low-rank update of weights, or is not known here.
NEUTRAL_FIELDS = {
    "auto_mapping": "names of the base model's classes",
    "base_model_name_or_path": "where the base model is",
    "corda_config": "initialization",
    "eva_config": "initialization",
    "exclude_modules": "read by is_target",
    "fan_in_fan_out": "storage of the base weight; peft corrects it by the kind of module, as is done here",
    "inference_mode": "training",
    "init_lora_weights": "read by check_adapter_config",
    "layers_pattern": "read by is_target",
    "layers_to_transform": "read by is_target",
    "loftq_config": "initialization",
    "lora_alpha": "read by scaling",
    "lora_dropout": "training",
    "lora_ga_config": "initialization",
    "megatron_core": "name of a package, used with megatron_config",
    "peft_type": "read by check_adapter_config",
    "peft_version": "of the writer",
    "qalora_group_size": "used with use_qalora",
    "r": "read by scaling",
    "rank_pattern": "read by scaling",
    "alpha_pattern": "read by scaling",
    "revision": "of the base model",
    "runtime_config": "where peft computes",
    "target_modules": "read by is_target",
    "task_type": "which wrapper peft uses",
    "use_rslora": "read by scaling",
    "bias": "read by check_adapter_config",
}
_IN_ADAPTER = re.compile(r"\.(base_layer|lora_\w+)(\.|$)")  # parts of an adapter that the model has already
# Initializations that leave the base weights as they are. Others (pissa, olora, corda, loftq, lora_ga) subtract the
# initial product from them when the adapter is loaded.
PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")


_NAMES = nullable(either(text, list_of(text)))
TARGETS = {"target_modules": _NAMES, "exclude_modules": _NAMES, "layers_pattern": _NAMES}
# Of the fields that are read here; all others are in NEUTRAL_FIELDS, or refused.
CONFIG = Record(
    {"r": whole(POSITIVE), "lora_alpha": number()},
    {
        **TARGETS,
        "layers_to_transform": nullable(either(whole(), list_of(whole()))),
        "rank_pattern": nullable(mapping_of(whole(POSITIVE))),
        "alpha_pattern": nullable(mapping_of(number())),
        "use_rslora": nullable(flag),
        "bias": text,
        "init_lora_weights": nullable(either(flag, text)),
    },
    is_open=True,
)


def check_adapter_config(config: Any, path: Path) -> None:
    """Refuse adapters that are more than low-rank updates of weights, and fields of other types.

    Args:
        path: the file, for messages.

    Raises:
        EditingError: it names the field.
    """
    source = path.parent
    with of_file(path):
        require_shallow("it", config)
        Record({"peft_type": text}, is_open=True)("", config)
        if config["peft_type"] == "LORA":
            CONFIG("", config)
    kind, extras = config["peft_type"], [name for name, value in config.items() if value and name not in NEUTRAL_FIELDS]
    if config.get("bias", "none") != "none":
        extras.append("bias")
    if (initialization := config.get("init_lora_weights", True)) not in PLAIN_INITIALIZATIONS:
        extras.append(f"init_lora_weights={initialization}, which changes the base weights")
    if kind != "LORA" or extras:
        kind = f"LORA with {', '.join(sorted(extras))}" if kind == "LORA" else kind
        raise EditingError(
            f"{source}: only plain LoRA adapters are edits of weights; this one is {kind}. Load it with peft={source} "
            "instead."
        )


def check_expressions(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse regular expressions of a configuration that are malformed, or could be matched for ever.

    Args:
        config: of any kind of adapter; other fields may hold anything.
        names: of the modules that they will be matched with.

    Raises:
        EditingError: it names the field.
    """
    Record({}, TARGETS, is_open=True)("", config)
    for field in ("target_modules", "exclude_modules"):
        if isinstance(expression := config.get(field), str):
            compiled(expression, field, names)
    for pattern in _layer_patterns(config):
        compiled(_of_layer(pattern), "layers_pattern", names)
    for field in ("rank_pattern", "alpha_pattern"):
        mapping_of()(field, config.get(field) or {})
        for key in config.get(field) or {}:
            compiled(_of_key(key), f"a key of {field}", names)


def rank_of(config: Mapping[str, Any], name: str) -> int:
    """The rank of the adapter at one module."""
    return int(_by_pattern(config.get("rank_pattern"), name, config["r"]))


def scaling(config: Mapping[str, Any], name: str) -> float:
    """The factor of ``lora_B @ lora_A`` that peft applies at one module."""
    rank, alpha = rank_of(config, name), float(_by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def target_names(config: Mapping[str, Any], model: nn.Module) -> set[str] | None:
    """Names of the linear maps that peft would adapt in a model; ``None`` where the configuration does not say."""
    targets = config.get("target_modules")
    if targets is None:
        return None
    inner = unwrapped(model)
    maps = {
        name: linear
        for name, module in inner.named_modules()
        if is_linear_map(linear := linear_of(module)) and not _IN_ADAPTER.search(name)
    }
    if targets == "all-linear":
        return {name for name, linear in maps.items() if linear is not head_of(inner)}
    return {name for name in maps if is_target(config, name)}


def is_target(config: Mapping[str, Any], name: str) -> bool:
    """Whether peft adapts the module of this name; every pattern is a regular expression or the end of a name."""
    excluded, targets = config.get("exclude_modules"), config["target_modules"]
    if excluded and (re.fullmatch(excluded, name) if isinstance(excluded, str) else _ends_with(name, excluded)):
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if name in targets:
        return True
    if not _ends_with(name, targets):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    expressions = [_of_layer(pattern) for pattern in _layer_patterns(config)] or [r".*?\.[^.]*\.(\d+)\."]
    found = next((match for expression in expressions if (match := re.match(expression, name))), None)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def _layer_patterns(config: Mapping[str, Any]) -> list[str]:
    patterns = config.get("layers_pattern") or []
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _of_layer(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(\d+)\."


def _of_key(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first pattern that matches a whole name or its end, after a dot."""
    matching = (value for key, value in (patterns or {}).items() if re.match(_of_key(key), name))
    return next(matching, default)
