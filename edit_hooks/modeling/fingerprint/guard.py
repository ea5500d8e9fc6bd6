"""Detection of an editor that leaves a model or a tokenizer changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.modeling.fingerprint.tensor_hash import sample_of, tensor_digest
from edit_hooks.utils.errors import ModelChangedError

MOST_NAMED = 3
HOOK_DICTIONARIES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


@contextlib.contextmanager
def unchanged(
    editor: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, whole: bool
) -> Iterator[None]:
    """Refuse a body that changes the model or the tokenizer, whether it returns or raises.

    Later edits and answers would be those of another model. Attributes and buffers that transformers sets while a model
    runs, as the tables of rotary embeddings, are not compared.

    Args:
        editor: name for the message.
        whole: compare every entry of every tensor, which reads all weights twice. Otherwise ``NUM_SAMPLED`` of each
            (:mod:`edit_hooks.modeling.fingerprint.tensor_hash`).

    Raises:
        ModelChangedError: with the names of what changed.
    """
    before = _state(model, tokenizer, whole)
    try:
        yield
    except Exception as error:
        _compare(editor, before, _state(model, tokenizer, whole), error)
        raise
    _compare(editor, before, _state(model, tokenizer, whole), None)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of everything that changed, appeared or disappeared between two states."""
    missing = object()
    return sorted(key for key in before.keys() | after.keys() if before.get(key, missing) != after.get(key, missing))


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything of a tokenizer that an editor might change."""
    return {
        "padding side": tokenizer.padding_side,
        "truncation side": tokenizer.truncation_side,
        "model max length": tokenizer.model_max_length,
        "special tokens": dict(tokenizer.special_tokens_map),
        "pad token": (tokenizer.pad_token, tokenizer.pad_token_id),
        "vocabulary size": len(tokenizer),
        "bos rule": tuple(tokenizer("a")["input_ids"]),
        "chat template": tokenizer.chat_template,
    }


def _compare(editor: str, before: dict[str, Any], after: dict[str, Any], cause: Exception | None) -> None:
    if not (found := changes(before, after)):
        return
    named = ", ".join(found[:MOST_NAMED]) + (f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    raise ModelChangedError(
        f"editor {editor!r} left the model or the tokenizer changed: {named}. compute must leave both as it found "
        "them, also if it raises: return the update in a Delta, and write copies back (try ... finally). No edit of "
        "this batch was stored. lm-edit check-editor finds such faults on tiny models."
    ) from cause


@torch.no_grad()
def _state(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, whole: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # accelerate puts another one in the place of an offloaded parameter with every pass
        state[f"the parameter {name}"] = None if parameter.is_meta else id(parameter)
        state[f"requires_grad of {name}"] = parameter.requires_grad
        state[f"the gradient of {name}"] = id(parameter.grad) if parameter.grad is not None else None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(tensor) and not tensor.is_meta:
            state[f"values of {name}"] = tensor_digest(tensor) if whole else sample_of(tensor)
    for name, module in model.named_modules():
        where = name or "the model"
        state[f"training mode of {where}"] = module.training
        state[f"the code of {where}"] = (type(module), id(vars(module).get("forward")))
        for hooks in HOOK_DICTIONARIES:
            state[f"{hooks} of {where}"] = tuple(getattr(module, hooks, ()))
    state["the configuration"] = model.config.to_dict()
    state["the attention implementation"] = model.config._attn_implementation  # which to_dict leaves out
    if model.generation_config is not None:
        state["the generation configuration"] = model.generation_config.to_dict()
    return state | {f"the tokenizer's {key}": value for key, value in tokenizer_state(tokenizer).items()}
