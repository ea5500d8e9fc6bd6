"""Settings of SERAC's training."""

from __future__ import annotations

from dataclasses import dataclass

from edit_hooks.base.config import config_field
from edit_hooks.editors.serac import SERACConfig
from edit_hooks.training.settings import TrainingSettings
from edit_hooks.utils.settings.numbers import POSITIVE

# Settings that an artifact fixes for every edit made with it.
ARTIFACT_SETTINGS = ("classifier", "pooling", "scope_texts", "counterfactual", "counterfactual_blocks")


@dataclass(kw_only=True)
class SERACTrainingConfig(SERACConfig, TrainingSettings):
    """Settings of SERAC and of its training; the artifact keeps :data:`ARTIFACT_SETTINGS`."""

    batch_size: int = config_field("edits that share the passes of the models", within=POSITIVE, default=10)
    edits_per_example: int = config_field("edits that are in the memory together", within=POSITIVE, default=10)
    lr: float = config_field("Adam learning rate of both models", within=POSITIVE, default=1e-5)
    num_validation: int = config_field("number of validation edits", within=POSITIVE, default=1000)
    edits_per_validation: int | None = config_field(
        "edits that are in the memory together in validation; null: edits_per_example", within=POSITIVE, default=1
    )
    patience: int = config_field(
        "optimizer steps without a better validation loss before the run stops", within=POSITIVE, default=4000
    )
    train_embeddings: bool = config_field(
        "train the counterfactual model's token embeddings and head, too", default=True
    )
