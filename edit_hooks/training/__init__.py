"""Training of hyper-networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from edit_hooks.training.edit_data import LossTerms, NumberedExample
    from edit_hooks.training.questions import TrainingQuestions
    from edit_hooks.training.settings import TrainingSettings
    from edit_hooks.training.trainer import Trainer

_HOMES = {
    "LossTerms": "edit_data",
    "NumberedExample": "edit_data",
    "Trainer": "trainer",
    "TrainingQuestions": "questions",
    "TrainingSettings": "settings",
}

__all__ = [
    "LossTerms",
    "NumberedExample",
    "Trainer",
    "TrainingQuestions",
    "TrainingSettings",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
