"""Resolution of an editor's configuration, with sampled settings in the store."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.storage.hashing import code_fingerprint


def resolve_with_store(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    editor: Editor[Any],
    store: Store | None,
    identity: ModelIdentity,
) -> dict[str, Any]:
    """Return the editor's full configuration; sampled settings (context templates) come from the store if it has them.

    Args:
        identity: of the unedited model.
    """
    description = Description(
        what="resolved editor configuration",
        model=identity.to_dict(),
        code=code_fingerprint(*editor.source_modules),
        inputs={"editor": editor.key_identity, "settings": editor.default_config(model).to_dict()},
    )
    stored = store.load_json("configurations", description) if store else None
    config = editor.resolve_config(model, tokenizer, stored).to_dict()
    if store and stored is None:
        store.save_json("configurations", description, config)
    return config
