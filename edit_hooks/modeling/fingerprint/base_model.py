"""Comparison of a model with the one that a file was made for."""

from __future__ import annotations

from collections.abc import Mapping

from edit_hooks.modeling.fingerprint.identity import ModelIdentity, differences
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

UNKNOWN = "it does not name the model it was made for; only its shapes are checked"


def compare_models(recorded: object, identity: ModelIdentity, source: str) -> list[str]:
    """Compare the identity in a file with that of a model, and log what differs or cannot be compared.

    Args:
        recorded: parts of an identity, or ``None``.
        identity: of the model and its tokenizer.
        source: name of the file, for messages.

    Returns:
        The logged sentences, for result files.

    Raises:
        EditingError: the file was made for other weights, or what it records is no identity.
    """
    if recorded is None:
        found = [UNKNOWN]
    elif isinstance(recorded, Mapping):
        _require_equal_weights(str(recorded.get("weights")), identity.weights, source)
        found = [f"its model differs from this one in {entry}" for entry in differences(identity.to_dict(), recorded)]
    else:
        raise EditingError(f"{source}: its model is a {type(recorded).__name__}; the parts of an identity are needed.")
    for text in found:
        log.warning("%s: %s.", source, text)
    return found


def _require_equal_weights(theirs: str, ours: str, source: str) -> None:
    if theirs != ours:
        raise EditingError(
            f"{source} was made for another model: its weights have the hash {theirs[:16]}..., those of this model "
            f"{ours[:16]}.... Load the model it was made for, in the same dtype."
        )
