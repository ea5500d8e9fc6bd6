"""Candidate settings of a search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.modeling.architectures import num_layers, unwrapped
from edit_hooks.utils.errors import unknown_keys_error

DEFAULT_DEPTHS = (0.1, 0.2, 0.3, 0.45, 0.6)  # of the last edited block, as shares of the model's depth
# Settings of the step size, of which the first that an editor has is varied -> factors.
STEP_FACTORS = {"lr": (0.2, 1.0), "relative_update": (0.3, 1.0, 3.0)}


def make_candidates(
    editor: str, model: nn.Module, shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Settings to try: the shared ones first, then all combinations of the varied ones, without duplicates.

    Args:
        shared: settings of every candidate.
        vary: setting -> values. Without ``layers`` five depths are tried, with as many blocks as the editor's
            configuration has; without a step size those of :data:`STEP_FACTORS`, times the editor's own.

    Raises:
        EditingError: for settings the editor does not have, and values it refuses.
    """
    config = load_editor(editor, shared).default_config(model)
    vary = {name: list(values) for name, values in vary.items()}
    vary.setdefault("layers", _default_layers(config, num_layers(unwrapped(model))))
    if not vary.keys() & STEP_FACTORS:
        sizes = ((name, _get_setting(config, name)) for name in STEP_FACTORS)
        if (step := next(((name, size) for name, size in sizes if size is not None), None)) is not None:
            name, size = step
            vary[name] = [factor * size for factor in STEP_FACTORS[name]]
    candidates = [{**shared, "layers": config.layers}]
    configs = [config.to_dict()]
    for values in itertools.product(*vary.values()):
        settings = dict(shared)
        for name, value in zip(vary, values, strict=True):
            settings = _with_setting(editor, settings, name, value)
        config_record = load_editor(editor, settings).default_config(model).to_dict()
        if config_record not in configs:
            configs.append(config_record)
            candidates.append(settings)
    return candidates


def sample_candidates(candidates: Sequence[dict[str, Any]], num: int | None, seed: int) -> list[dict[str, Any]]:
    """The first candidate and a random choice of the others, ``num`` in all; every candidate for ``None``."""
    if num is None or num >= len(candidates):
        return list(candidates)
    return [candidates[0], *random.Random(seed).sample(candidates[1:], num - 1)]


def _default_layers(config: EditorConfig, depth: int) -> list[list[int]]:
    assert config.layers is not None
    size = len(config.layers)
    last_blocks = {round(share * (depth - 1)) for share in DEFAULT_DEPTHS}
    return [list(range(last - size + 1, last + 1)) for last in sorted(last_blocks) if last - size + 1 >= 0]


def _get_setting(config: EditorConfig, name: str) -> Any:
    """A setting of an editor, or of the base editor of a post-processing one."""
    return getattr(config, name, None) if hasattr(config, name) else getattr(config, "base_settings", {}).get(name)


def _with_setting(editor: str, settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The settings with one more; a post-processing editor passes settings it does not have to its base."""
    accepted = {field.name for field in fields(editor_class(editor).config_class)}
    if name in accepted:
        return {**settings, name: value}
    if "base_settings" not in accepted:
        raise unknown_keys_error(f"setting of {editor}", [name], accepted)
    return {**settings, "base_settings": {**settings.get("base_settings", {}), name: value}}
