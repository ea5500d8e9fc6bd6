"""Training runs of MEND on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.editors.mend import MEND
from edit_hooks.training.edit_data import EditData, EditExample
from edit_hooks.training.mend.config import TrainingConfig
from edit_hooks.training.mend.trainer import MENDTrainer
from edit_hooks.training.settings import resolve_settings

SETTINGS: dict[str, Any] = {
    "layers": [EDIT_LAYER],
    "rank": 16,
    "edit_lr": 1e-2,
    "num_steps": 30,
    "accumulate": 2,
    "lr": 1e-3,
    "c_edit": 1.0,
    "lr_step_sizes": 3e-3,
    "validate_every": 10,
}
PLACES = (
    *("Velm", "Karsk", "Rome", "Paris", "London", "Berlin"),
    *("Vienna", "Hamburg", "Canada", "Lisbon", "Kyoto", "Toronto"),
)


def examples(first: int, last: int) -> list[EditExample]:
    """Training edits about the places from number ``first`` to ``last - 1``."""
    return [
        EditExample(
            prompt=f"The capital of {place} is",
            target=PLACES[(index + 5) % len(PLACES)],
            paraphrases=(f"You can see that the capital of {place} is", f"The largest city of {place} is"),
            locality=((f"The train to {place} was two hours", "late"),),
        )
        for index, place in list(enumerate(PLACES))[first:last]
    ]


DATA = EditData(examples(0, 9), examples(9, 12), {"made": "here"})


def trainer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, data: EditData = DATA, **changes: Any
) -> MENDTrainer:
    config = resolve_settings(TrainingConfig, MEND, model, {**SETTINGS, **changes})
    return MENDTrainer(model, tokenizer, config, data, out, {"model_name": "tiny"}, quiet=True)
