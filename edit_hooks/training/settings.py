"""Settings that trainings share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class TrainingSettings(EditorConfig):
    """Settings of a training, beside those of its editor."""

    batch_size: int = config_field("edits that share the passes of the model", within=POSITIVE, default=8)
    num_steps: int = config_field("optimizer steps at most", within=POSITIVE, default=10000)
    accumulate: int = config_field("batches per optimizer step", within=POSITIVE, default=10)
    edits_per_example: int = config_field("edits made jointly in a batch", within=POSITIVE, default=1)
    lr: float = config_field("Adam learning rate of the networks", within=POSITIVE, default=1e-6)
    max_grad_norm: float = config_field("gradients are clipped to this norm", within=POSITIVE, default=100.0)
    c_edit: float = config_field("weight of the edit loss", within=NON_NEGATIVE, default=0.1)
    c_loc: float = config_field("weight of the locality loss", within=NON_NEGATIVE, default=1.0)
    edit_loss: Literal["paraphrase", "edit"] = config_field(
        "prompt of the edit loss: a paraphrase (paper) or the edit itself (EasyEdit)", default="paraphrase"
    )
    locality_tokens: Literal["all", "answer"] = config_field("tokens of the locality loss", default="all")
    validate_every: int = config_field(
        "optimizer steps between validations (and saved states)", within=POSITIVE, default=100
    )
    num_validation: int = config_field("number of validation examples", within=POSITIVE, default=100)
    patience: int = config_field(
        "optimizer steps without a better validation loss before the run stops", within=POSITIVE, default=2000
    )
