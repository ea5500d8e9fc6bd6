"""Settings that trainings share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.shipped import find_shipped
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

SettingsT = TypeVar("SettingsT", bound="TrainingSettings")


@dataclass(kw_only=True)
class TrainingSettings(EditorConfig):
    """Settings of a training, beside those of its editor."""

    batch_size: int = config_field("edits that share the passes of the model", within=POSITIVE, default=8)
    num_steps: int = config_field(
        "optimizer steps at most, each of accumulate batches; raise it to resume a finished run",
        within=POSITIVE,
        default=10000,
    )
    accumulate: int = config_field("batches per optimizer step", within=POSITIVE, default=10)
    edits_per_example: int = config_field("edits made jointly in a batch", within=POSITIVE, default=1)
    lr: float = config_field("Adam learning rate of the networks", within=POSITIVE, default=1e-6)
    max_grad_norm: float = config_field("gradients are clipped to this norm", within=POSITIVE, default=100.0)
    c_edit: float = config_field("weight of the edit loss", within=NON_NEGATIVE, default=0.1)
    c_loc: float = config_field("weight of the locality loss", within=NON_NEGATIVE, default=1.0)
    edit_loss: Literal["paraphrase", "edit"] = config_field(
        "prompt of the edit loss: a paraphrase (paper) or the edit itself (EasyEdit)", default="paraphrase"
    )
    locality_tokens: Literal["all", "answer"] = config_field(
        "tokens of the locality loss: all after the first, or those of the answer (EasyEdit)", default="all"
    )
    validate_every: int = config_field(
        "optimizer steps between validations (and saved states)", within=POSITIVE, default=100
    )
    num_validation: int = config_field("number of validation edits", within=POSITIVE, default=100)
    edits_per_validation: int | None = config_field(
        "edits made jointly in validation; null: edits_per_example", within=POSITIVE, default=None
    )
    patience: int = config_field(
        "optimizer steps without a better validation loss before the run stops", within=POSITIVE, default=2000
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edits_per_validation is None:
            self.edits_per_validation = self.edits_per_example
        if self.patience < self.validate_every:
            raise EditingError(
                f"the settings 'patience' ({self.patience}) and 'validate_every' ({self.validate_every}): a run cannot "
                "lose patience between two validations; raise 'patience', or lower 'validate_every'."
            )


def resolve_settings(
    config_class: type[SettingsT], editor_class: type[Editor[Any]], model: nn.Module, settings: Mapping[str, Any]
) -> SettingsT:
    """Training settings for a model: defaults, then the editor's shipped file, then ``settings``.

    Raises:
        EditingError: for unknown settings (with near misses) and values out of range.
    """
    config_class.from_mapping(settings)
    if "artifact" in settings:
        raise EditingError("'artifact' is the output of training; drop it, and name the folder with --out.")
    editor_fields = [field.name for field in dataclasses.fields(editor_class.config_class)]
    editor = editor_class({name: value for name, value in settings.items() if name in editor_fields})
    resolved = editor.default_config(model)
    shipped = find_shipped(editor_class.config_folders, unwrapped(model).config, settings.get("shipped"))
    of_editor = {name: getattr(resolved, name) for name in editor_fields}
    try:
        return config_class.from_mapping({**of_editor, **shipped.training, **settings})
    except EditingError as error:
        if not shipped.training:
            raise
        raise EditingError(f"{error} (Shipped settings: {shipped.file}.)") from None
