"""Settings of MEND's training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from edit_hooks.base.config import config_field
from edit_hooks.editors.mend import MEND, MENDConfig
from edit_hooks.training.settings import TrainingSettings, resolve_settings
from edit_hooks.utils.numbers import NON_NEGATIVE

# Settings that an artifact fixes for every edit made with it.
ARTIFACT_SETTINGS = ("layers", "modules", "edit_lr", "rank", "num_hidden", "normalize", "sign", "append_eos")


@dataclass(kw_only=True)
class TrainingConfig(MENDConfig, TrainingSettings):
    """Settings of MEND and of its training; the artifact keeps :data:`ARTIFACT_SETTINGS`."""

    lr_step_sizes: float = config_field("Adam learning rate of the step sizes", within=NON_NEGATIVE, default=1e-4)


def training_config(model: nn.Module, settings: Mapping[str, Any]) -> TrainingConfig:
    """Settings of a training for a model; see :func:`~edit_hooks.training.settings.resolve_settings`."""
    return resolve_settings(TrainingConfig, MEND, model, settings)
