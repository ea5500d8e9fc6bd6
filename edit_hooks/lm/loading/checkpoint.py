"""Loading of models that refuses incomplete files, where transformers only warns."""

from __future__ import annotations

from typing import Any

from edit_hooks.utils.checkpoints import REPORTED, require_complete


class CompleteLoading:
    """A transformers class whose ``from_pretrained`` refuses incomplete checkpoints.

    Args:
        model_class: for example ``AutoModelForCausalLM``.
    """

    def __init__(self, model_class: Any) -> None:
        self.model_class = model_class

    def from_pretrained(self, source: str, *args: Any, **kwargs: Any) -> Any:
        """Load a model.

        Raises:
            EditingError: weights are missing, or have other shapes than the model's.
        """
        model, report = self.model_class.from_pretrained(source, *args, **{**kwargs, **REPORTED})
        require_complete(report, str(source))
        return model
