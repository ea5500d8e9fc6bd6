"""Loading of models and adapters that refuses incomplete files, where transformers and peft only warn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edit_hooks.utils.checkpoints import REPORTED, require_complete
from edit_hooks.utils.errors import EditingError

if TYPE_CHECKING:  # an optional dependency
    from peft import PeftModel


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


def require_complete_adapter(model: PeftModel, source: str, revision: str | None) -> None:
    """Refuse a peft model whose adapter and tensors do not belong together.

    Args:
        model: with one adapter, loaded from ``source``.

    Raises:
        EditingError: the adapter has parameters that are not in the file, or the file some that the adapter lacks.
    """
    from peft import get_peft_model_state_dict, load_peft_weights
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    (config,) = model.peft_config.values()
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if not prefix:  # prompt tuning: one tensor, which peft requires
        return
    stored = load_peft_weights(source, device="cpu", revision=revision)
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    differing = sorted(name for name in stored.keys() ^ loaded.keys() if prefix in name)
    if differing:
        what = "lacks" if differing[0] in loaded else "is of another base model: it has"
        raise EditingError(f"the adapter {source} {what} {differing[0]} (and {len(differing) - 1} more differ).")
