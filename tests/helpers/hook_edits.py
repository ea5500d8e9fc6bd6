"""Hook edits on tiny models, and answers under them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks import Delta, Editor, EditRequest, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.memory.side_memory import Memory
from edit_hooks.modeling.tokens import split_continuation

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]

# Editor -> settings under which it is quick on tiny models.
SETTINGS: dict[str, dict[str, Any]] = {
    editor: contract_settings(editor_class(editor)) for editor in EDITORS if "hooks" in editor_class(editor).writes
}


@functools.cache
def loaded(model_type: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The tiny model of a family and its tokenizer."""
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


def make(editor: str, **overrides: Any) -> Editor[Any]:
    """An editor under its quick settings."""
    return load_editor(editor, {**SETTINGS[editor], **overrides})


def stream_of(
    editor: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    requests: Sequence[EditRequest],
    **overrides: Any,
) -> list[Delta]:
    """The steps of a stream, one request each."""
    stream_editor = make(editor, **overrides)
    steps: list[Delta] = []
    for request in requests:
        steps += stream_editor.edit(model, tokenizer, [request], history=steps, measure=False)
    return steps


def score_item(tokenizer: PreTrainedTokenizerFast, request: EditRequest, text: str | None = None) -> ScoreItem:
    """The target of a request after its prompt, or after ``text``."""
    prompt, target = split_continuation(tokenizer, text or request.text, f" {request.target_new}")
    return ScoreItem(tuple(prompt), tuple(target))


def generate_item(tokenizer: PreTrainedTokenizerFast, text: str, length: int = 8) -> GenerateItem:
    """A greedy continuation of ``text`` by ``length`` tokens."""
    return GenerateItem(tuple(tokenizer(text)["input_ids"]), (), length)


def nll(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    request: EditRequest,
    delta: Delta | None,
    text: str | None = None,
) -> float:
    """Negative log-likelihood per target token under an edit."""
    (answer,) = score(model, [(score_item(tokenizer, request, text), delta)], Limits(), lambda count: None)
    return -answer.logprob / answer.num_tokens


def texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Sequence[tuple[GenerateItem, Delta | None]]
) -> list[list[int]]:
    """Generated token ids of every item."""
    return [list(answer.token_ids) for answer in generate(model, tokenizer, items, Limits(), lambda count: None)]


def weight_of(model: PreTrainedModel, delta: Delta) -> torch.Tensor:
    """The weight of the hooked module."""
    return model.get_submodule(delta.hook_edit.settings["module"]).weight.detach()


@torch.no_grad()
def prompt_distance(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, memory: Memory, delta: Delta
) -> float:
    """The distance of a prompt by hand: the module run with either weight on the prompt's own activations."""
    module, seen = model.get_submodule(delta.hook_edit.settings["module"]), {}
    handle = module.register_forward_hook(lambda _m, args, output: seen.update(x=args[0], y=output))
    model(torch.tensor([tokenizer(text)["input_ids"]]))
    handle.remove()
    other = seen["x"] @ (module.weight + memory.change).T
    act = torch.nn.functional.silu
    return float((act(other) - act(seen["y"])).norm(dim=-1).mean())
