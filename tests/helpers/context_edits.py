"""In-context edits, made without a model."""

from __future__ import annotations

from typing import Any

import torch

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.deltas.context_edit import ContextEdit

ICE = ContextEdit("Port Elna is the capital of", "Dravonia")
FACT = "New Fact: Port Elna is the capital of Dravonia\n"
REQUEST = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia", case_id="7")
WORDS = {"embedder": "words"}


def context_edits(editor: str, *requests: EditRequest, **settings: Any) -> list[Delta]:
    """Edits of an in-context editor; by default of the request about Port Elna."""
    return load_editor(editor, settings).edit(_NoModel(), build_tokenizer("byte_bpe"), list(requests or [REQUEST]))


class _NoModel(torch.nn.Module):
    """Contexts do not depend on the model."""

    class config:
        model_type = "anything"
