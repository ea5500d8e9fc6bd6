"""Settings of MEND's training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from edit_hooks.base.config import config_field
from edit_hooks.editors.mend import MEND, MENDConfig
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE, POSITIVE

# Settings that an artifact fixes for every edit made with it.
ARTIFACT_SETTINGS = ("layers", "modules", "edit_lr", "rank", "num_hidden", "normalize", "sign", "append_eos")


@dataclass(kw_only=True)
class TrainingConfig(MENDConfig):
    """Settings of MEND and of its training; the artifact keeps :data:`ARTIFACT_SETTINGS`."""

    num_steps: int = config_field("optimizer steps at most", within=POSITIVE, default=10000)
    accumulate: int = config_field("batches per optimizer step", within=POSITIVE, default=10)
    edits_per_example: int = config_field("edits made jointly in a batch", within=POSITIVE, default=1)
    lr: float = config_field("Adam learning rate of the networks", within=POSITIVE, default=1e-6)
    lr_step_sizes: float = config_field("Adam learning rate of the step sizes", within=NON_NEGATIVE, default=1e-4)
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
