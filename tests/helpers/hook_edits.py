"""Edits that act through hooks, made on tiny models, and the questions asked under them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny import EDIT_LAYER, NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.tokens import split_continuation

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]


SETTINGS: dict[str, dict[str, Any]] = {
    "grace": {"layers": [EDIT_LAYER], "num_steps": 8, "lr": 0.5},
    "wise": {
        "layers": [EDIT_LAYER],
        "num_steps": 8,
        "lr": 0.3,
        "mask_ratio": 0.5,
        "act_ratio": 0.5,
        "alpha": 0.5,
        "beta": 4.0,
        "gamma": 2.0,
        "context_templates": ["{}", "The band released. {}"],
        "loc_prompts": ["The museum in Karsk shows paintings."],
    },
    "melo": {"layers": [EDIT_LAYER], "num_steps": 8, "lr": 0.01, "scale": 8.0, "radius": 0.05},
}


@functools.cache
def loaded(model_type: str, dtype: torch.dtype = torch.float32):
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


def make(editor: str, **overrides: Any):
    return load_editor(editor, {**SETTINGS[editor], **overrides})


def stream_of(editor: str, model, tokenizer, requests, **overrides: Any) -> list[Delta]:
    """The steps of a stream, each made with what came before."""
    chosen, history = make(editor, **overrides), []
    for request in requests:
        history += chosen.edit(model, tokenizer, [request], history=history)
    return history


def score_item(tokenizer, request: EditRequest, text: str | None = None) -> ScoreItem:
    prompt, target = split_continuation(tokenizer, text or request.text, f" {request.target_new}")
    return ScoreItem(tuple(prompt), tuple(target))


def generate_item(tokenizer, text: str, length: int = 8) -> GenerateItem:
    return GenerateItem(tuple(tokenizer(text)["input_ids"]), (), length)


def nll(model, tokenizer, request: EditRequest, delta: Delta | None, text: str | None = None) -> float:
    (answer,) = score(model, [(score_item(tokenizer, request, text), delta)], Limits(), lambda count: None)
    return -answer.logprob / answer.num_tokens


def texts(model, tokenizer, items, **_: Any) -> list[list[int]]:
    return [list(answer.token_ids) for answer in generate(model, tokenizer, items, Limits(), lambda count: None)]
