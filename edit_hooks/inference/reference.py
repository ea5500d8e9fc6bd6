"""Reference engine: one question at a time, with its edit in the weights.

Slow and simple. ``engine=reference`` uses it, and so do tests of :mod:`edit_hooks.inference.scoring` and
:mod:`edit_hooks.inference.decoding`, which have the same inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from edit_hooks.answers import GeneratedText, ScoredContinuation, StopReason
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.finite_logits import LogitWatch
from edit_hooks.inference.generation.checkpoint_rules import rules_off
from edit_hooks.inference.generation.continuations import end_token_ids, generated_text, has_full_length, is_stopped
from edit_hooks.inference.generation.drawing import TokenDraw
from edit_hooks.inference.items import GenerateItem, ScoreItem
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.forward.length_dependence import forget_lengths
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.hooks import frozen, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.progress import Finished, Progress, ignore_finished


def score_reference(
    model: nn.Module,
    items: Sequence[tuple[ScoreItem, Delta | None]],
    progress: Progress,
    finished: Finished = ignore_finished,
) -> list[ScoredContinuation]:
    """Score whole sequences with all logits, one item at a time."""
    answers = []
    with frozen(unwrapped(model)), gradients(False):
        for item, delta in items:
            forget_lengths(unwrapped(model))
            with edited(model, *([] if delta is None else [delta]), prompt_lengths=[len(item.context)]):
                answers.append(_score_one(unwrapped(model), item))
            finished([len(answers) - 1], answers[-1:])
            progress(1)
    return answers


def _score_one(model: PreTrainedModel, item: ScoreItem) -> ScoredContinuation:
    fed = torch.tensor([[*item.context, *item.continuation][:-1]], device=model.device)
    logprobs = at_least_float32(model(input_ids=fed, use_cache=False).logits[0, len(item.context) - 1 :]).log_softmax(1)
    token_logprobs = [float(logprobs[i, token]) for i, token in enumerate(item.continuation)]
    return item.answer(token_logprobs, logprobs.argmax(1).tolist())


def generate_reference(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[tuple[GenerateItem, Delta | None]],
    progress: Progress,
    finished: Finished = ignore_finished,
) -> list[GeneratedText]:
    """Continue with the model's own ``generate``, one item at a time; draws are made from its logits."""
    answers = []
    with frozen(unwrapped(model)):
        for item, delta in items:
            forget_lengths(unwrapped(model))
            with edited(model, *([] if delta is None else [delta]), prompt_lengths=[len(item.context)]):
                answers.append(_generate_one(unwrapped(model), tokenizer, item))
            finished([len(answers) - 1], answers[-1:])
            progress(1)
    return answers


class _StopOnText(StoppingCriteria):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, item: GenerateItem, watch: LogitWatch) -> None:
        self.tokenizer, self.item, self.watch = tokenizer, item, watch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        new_tokens = input_ids[0, len(self.item.context) :].tolist()
        ended = not self.watch.is_finite or is_stopped(self.tokenizer, new_tokens, self.item)
        ended = ended or has_full_length(self.tokenizer, new_tokens, self.item)
        return torch.tensor([ended], device=input_ids.device)


class _Draw(LogitsProcessor):
    """Leaves the drawn token alone, so that greedy decoding takes it."""

    def __init__(self, draw: TokenDraw) -> None:
        self.draw = draw

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        chosen = self.draw.token(scores[0])
        drawn = torch.full_like(scores, -torch.inf)
        drawn[0, chosen] = 0.0
        return cast(torch.FloatTensor, drawn)


class _Forced(LogitsProcessor):
    """Records the most likely tokens and continues with those of the target."""

    def __init__(self, item: GenerateItem) -> None:
        assert item.target is not None
        self.target, self.most_likely = item.target, list[int]()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        read = torch.full_like(scores, -torch.inf)
        read[0, self.target[len(self.most_likely)]] = 0.0
        self.most_likely.append(int(scores[0].argmax()))
        return cast(torch.FloatTensor, read)


def _generate_one(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, item: GenerateItem) -> GeneratedText:
    prompt = torch.tensor([item.context], device=model.device)
    ends = set() if item.ignore_end else end_token_ids(model, tokenizer)
    processors: list[LogitsProcessor] = [] if item.sampling is None else [_Draw(TokenDraw(item))]
    forced = _Forced(item) if item.forced else None
    processors += [] if forced is None else [forced]
    watch = LogitWatch(model)
    with hooks(watch.registration):
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=item.most_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(ends) or None,
            pad_token_id=min(ends, default=0),
            stopping_criteria=StoppingCriteriaList([_StopOnText(tokenizer, item, watch)]),
            logits_processor=LogitsProcessorList(processors),
            **rules_off(item),
        )
    tokens = output[0, prompt.shape[1] :].tolist() if forced is None else forced.most_likely
    if not watch.is_finite:  # the last token is of these logits
        return generated_text(tokenizer, tokens[:-1], item, "not_finite")
    stop: StopReason = "stop_string" if is_stopped(tokenizer, tokens, item) else "length"
    if tokens and tokens[-1] in ends:
        stop = "eos"
    return generated_text(tokenizer, tokens, item, stop)
