"""Generations of lm-eval's own tasks under edits outside the weights, by the rules of lm-eval's model class.

The unedited model and edits in the weights are asked by that class itself, and their columns are compared with these.
Its rules differ from those of editing documents in the thought: it shares the length of the answer, stop strings end
the generation inside it as well, and it is removed from the text afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.models.utils import postprocess_generated_text
from torch import nn

from edit_hooks.answers import BrokenText, GeneratedText
from edit_hooks.inference.finite_logits import LogitsBrokenError, LogitWatch
from edit_hooks.inference.items import GenerateItem
from edit_hooks.lm.asking.item_builder import ItemBuilder
from edit_hooks.lm.loading.hflm import LateLoadingHFLM
from edit_hooks.modeling.fingerprint.generation_settings import generation_settings
from edit_hooks.modeling.hooks import hooks


def stock_items(builder: ItemBuilder, requests: Sequence[Instance], model: nn.Module) -> list[GenerateItem]:
    """The items of generation requests for a model."""
    items = [builder.stock_generate_item(*request.args).item for request in requests]
    if length := generation_settings(model).get("max_new_tokens"):
        items = [dataclasses.replace(item, max_new_tokens=length) for item in items]  # generate prefers it
    return items


def stock_text(lm: LateLoadingHFLM, item: GenerateItem, answer: GeneratedText) -> str:
    """The text of an answer as lm-eval's class returns it."""
    end, text, ids = lm.think_end_token, answer.raw, list(answer.token_ids or ())
    if isinstance(end, int):
        if end in ids:
            text = lm.tok_decode(ids[len(ids) - ids[::-1].index(end) :])
        text = text.lstrip()
        end = None
    text = str(postprocess_generated_text(text, list(item.stops), end))
    return text if answer.is_finite else BrokenText(text)


def watched_texts(
    model: nn.Module, requests: Sequence[Instance], generate: Callable[[list[Instance]], list[str]]
) -> list[str]:
    """The answers of lm-eval's class to generation requests; :class:`BrokenText` where logits were not finite.

    Its batches do not tell which row was broken, so if one was, every request is asked again by itself, as far as its
    first broken logits.

    Args:
        model: the unwrapped model.
        generate: asks the class.
    """
    watch = LogitWatch(model)
    with hooks(watch.registration):
        texts = generate(list(requests))
    if watch.is_finite:
        return texts
    return [
        BrokenText(text) if _breaks(model, request, generate) else text
        for request, text in zip(requests, texts, strict=True)
    ]


def _breaks(model: nn.Module, request: Instance, generate: Callable[[list[Instance]], list[str]]) -> bool:
    with contextlib.suppress(LogitsBrokenError), hooks(LogitWatch(model, ends_pass=True).registration):
        generate([request])
        return False
    return True
