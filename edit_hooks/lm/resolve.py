"""TODO: say what is here."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.store.store import Store
from edit_hooks.utils.hashing import code_fingerprint


def resolve_with_store(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, editor: Editor, store: Store | None
) -> tuple[str, dict[str, Any]]:
    """Fingerprint of the untouched model and the editor's full configuration for it.

    What the configuration draws at random (context templates) is taken from the store when it is there.
    """
    fingerprint = model_fingerprint(model)
    description = {
        "what": "resolved editor configuration",
        "model": fingerprint,
        "editor": editor.name,
        "settings": editor.config_for(model).to_dict(),
        "code": code_fingerprint(),
    }
    kept = store.load_json("configurations", description) if store else None
    if kept is not None:
        editor.adopt(model, kept)
    config = editor.resolve(model, tokenizer).to_dict()
    if store and kept is None:
        store.save_json("configurations", description, config)
    return fingerprint, config
