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
from edit_hooks.utils.errors import EditingError, unknown_keys_error
from lm_edit.tuning.steps import StepSetting, scaled

DEFAULT_DEPTHS = (0.1, 0.2, 0.3, 0.45, 0.6)  # of the last edited block, as shares of the model's depth
STEP_SETTINGS = ("lr", "relative_update", "edit_lr")  # of which the first that an editor has is its step
STEP_FACTORS = (0.3, 1.0, 3.0)  # around the step


def make_candidates(
    editor: str,
    model: nn.Module,
    shared: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
    step_size: float | None = None,
) -> list[dict[str, Any]]:
    """Settings to try: the shared ones first, then all combinations of the varied ones, without duplicates.

    Args:
        shared: settings of every candidate; layers and a step among them are not varied, see :func:`fixed_settings`.
        vary: setting -> values. Without ``layers`` five depths are tried, with as many blocks as the editor's
            configuration has, as far as they fit and the editor accepts them, else its configuration's blocks alone;
            without a step size :data:`STEP_FACTORS` of it.
        step_size: the step found by :func:`~lm_edit.tuning.steps.find_step`; by default the editor's own.

    Raises:
        EditingError: for settings the editor does not have, and values it refuses.
    """
    loaded = load_editor(editor, shared)
    config, own_layers = loaded.default_config(model), loaded.layer_settings(model)
    step = step_of(editor, model, shared, vary)
    if "layers" in vary:
        places = [{"layers": layers} for layers in vary["layers"]]
    elif "layers" in fixed_settings(shared, vary):
        places = [own_layers]
    else:
        depths = _default_layers(config, num_layers(unwrapped(model)))
        places = [{"layers": layers} for layers in depths if _accepts(editor, model, {**shared, "layers": layers})]
    others = {name: list(values) for name, values in vary.items() if name != "layers"}
    if step is not None:
        size = step.size if step_size is None else step_size
        others[step.name] = [scaled(size, factor) for factor in STEP_FACTORS]
    candidates = [_with_settings(editor, shared, own_layers)]
    configs = [config.to_dict()]
    tried = [
        _with_settings(editor, shared, {**place, **dict(zip(others, values, strict=True))})
        for place in places or [own_layers]
        for values in itertools.product(*others.values())
    ]
    if step is not None and step_size is not None:
        tried.insert(0, step.with_size(step_size))
    for settings in tried:
        config_record = load_editor(editor, settings).default_config(model).to_dict()
        if config_record not in configs:
            configs.append(config_record)
            candidates.append(settings)
    return candidates


def step_of(
    editor: str, model: nn.Module, shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]
) -> StepSetting | None:
    """The editor's step, to be tried on the first of the varied layers.

    ``None`` for an editor without one, where ``vary`` or ``shared`` names its values, and where the editor refuses
    other ones, as with a trained hyper-network.
    """
    named = _step_to_vary(editor, model, shared, vary)
    if named is None or not _accepts_step(editor, model, shared, *named):
        return None
    name, size = named
    place = {"layers": vary["layers"][0]} if "layers" in vary else load_editor(editor, shared).layer_settings(model)
    settings = _with_settings(editor, shared, place)
    return StepSetting(name, size, lambda size: _with_setting(editor, settings, name, size))


def refused_step(
    editor: str, model: nn.Module, shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]
) -> tuple[str, float] | None:
    """Name and size of a step to which the editor's other settings hold it, as a trained hyper-network does."""
    named = _step_to_vary(editor, model, shared, vary)
    return None if named is None or _accepts_step(editor, model, shared, *named) else named


def _step_to_vary(
    editor: str, model: nn.Module, shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]
) -> tuple[str, float] | None:
    """Name and size of the editor's step, unless its values are named."""
    if {*vary, *fixed_settings(shared, vary)} & set(STEP_SETTINGS):
        return None
    config = load_editor(editor, shared).default_config(model)
    sizes = ((name, _get_setting(config, name)) for name in STEP_SETTINGS)
    return next(((name, size) for name, size in sizes if size is not None), None)


def _accepts_step(editor: str, model: nn.Module, shared: Mapping[str, Any], name: str, size: float) -> bool:
    return _accepts(editor, model, _with_setting(editor, shared, name, scaled(size, STEP_FACTORS[0])))


def fixed_settings(shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> list[str]:
    """Layers and step of every candidate, by name: those that the shared settings, or those of the base, name."""
    base = shared.get("base_settings")
    settings = {**(base if isinstance(base, Mapping) else {}), **shared}
    return [name for name in ("layers", *STEP_SETTINGS) if settings.get(name) is not None and name not in vary]


def sample_candidates(
    candidates: Sequence[dict[str, Any]], num: int | None, seed: int, keep: int = 1
) -> list[dict[str, Any]]:
    """The first ``keep`` candidates and a random choice of the others, ``num`` in all; all of them for ``None``.

    Of more than ``num`` to keep the last ones stay: the step found comes after the editor's own settings.
    """
    if num is None or num >= len(candidates):
        return list(candidates)
    kept = list(candidates[:keep][-num:])
    return [*kept, *random.Random(seed).sample(candidates[keep:], num - len(kept))]


def _default_layers(config: EditorConfig, depth: int) -> list[list[int]]:
    assert config.layers is not None
    size = len(config.layers)
    last_blocks = {round(share * (depth - 1)) for share in DEFAULT_DEPTHS}
    return [list(range(last - size + 1, last + 1)) for last in sorted(last_blocks) if last - size + 1 >= 0]


def _accepts(editor: str, model: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Whether an editor has these settings for the model; one that reads a block below cannot edit the first."""
    try:
        load_editor(editor, settings).default_config(model)
    except EditingError:
        return False
    return True


def _get_setting(config: EditorConfig, name: str) -> Any:
    """A setting of an editor, or of the base editor of a post-processing one."""
    return getattr(config, name, None) if hasattr(config, name) else getattr(config, "base_settings", {}).get(name)


def _with_settings(editor: str, shared: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(shared)
    for name, value in named.items():
        settings = _with_setting(editor, settings, name, value)
    return settings


def _with_setting(editor: str, settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The settings with one more; a post-processing editor passes settings it does not have to its base."""
    accepted = {field.name for field in fields(editor_class(editor).config_class)}
    if name in accepted:
        return {**settings, name: value}
    if "base_settings" not in accepted:
        raise unknown_keys_error(f"setting of {editor}", [name], accepted)
    return {**settings, "base_settings": {**settings.get("base_settings", {}), name: value}}
