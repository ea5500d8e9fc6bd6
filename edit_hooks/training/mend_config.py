"""Settings of MEND's training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from edit_hooks.base.config import config_field
from edit_hooks.editors.mend import MEND, MENDConfig
from edit_hooks.training.settings import TrainingSettings
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE

# Settings that an artifact fixes for every edit made with it.
ARTIFACT_SETTINGS = ("layers", "modules", "edit_lr", "rank", "num_hidden", "normalize", "sign", "append_eos")


@dataclass(kw_only=True)
class TrainingConfig(MENDConfig, TrainingSettings):
    """Settings of MEND and of its training; the artifact keeps :data:`ARTIFACT_SETTINGS`."""

    lr_step_sizes: float = config_field("Adam learning rate of the step sizes", within=NON_NEGATIVE, default=1e-4)


def training_config(model: nn.Module, settings: Mapping[str, Any]) -> TrainingConfig:
    """Training settings for a model: defaults, then the shipped file of editor ``mend``, then ``settings``.

    Raises:
        EditingError: for unknown settings (with near misses) and values out of range.
    """
    TrainingConfig.from_mapping(settings)
    if "artifact" in settings:
        raise EditingError("'artifact' is the output of training; drop it, and name the folder with --out.")
    editor_fields = [field.name for field in dataclasses.fields(MENDConfig)]
    editor = MEND({name: value for name, value in settings.items() if name in editor_fields})
    resolved = editor.default_config(model)
    return TrainingConfig(**{**{name: getattr(resolved, name) for name in editor_fields}, **settings})
