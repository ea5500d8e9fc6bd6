"""Settings of MEND's training."""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.base.config import config_field
from edit_hooks.editors.mend import MENDConfig
from edit_hooks.training.settings import TrainingSettings
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

# Settings that an artifact fixes for every edit made with it.
ARTIFACT_SETTINGS = ("layers", "modules", "edit_lr", "rank", "num_hidden", "normalize", "sign", "append_eos")


@dataclass(kw_only=True)
class TrainingConfig(MENDConfig, TrainingSettings):
    """Settings of MEND and of its training; the artifact keeps :data:`ARTIFACT_SETTINGS`."""

    batch_size: int = config_field("edits that share the passes of the model", within=POSITIVE, default=8)
    lr_step_sizes: float = config_field("Adam learning rate of the step sizes", within=NON_NEGATIVE, default=1e-4)
