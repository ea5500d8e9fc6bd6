"""Tokens that items are continued by: how each is chosen, when a text ends, and its answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import GeneratedText, StopReason
from edit_hooks.inference.generation.checkpoint_rules import CheckpointRules
from edit_hooks.inference.generation.drawing import TokenDraw
from edit_hooks.inference.items import GenerateItem
from edit_hooks.modeling.fingerprint.generation_settings import generation_settings
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, LMHead
from edit_hooks.modeling.forward.vocab_loss import NO_TOKEN


class Continuations:
    """The new tokens of items, and why each has stopped."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, items: Sequence[GenerateItem]) -> None:
        self.tokenizer, self.items = tokenizer, items
        self.end_tokens = end_token_ids(model, tokenizer)
        self.draws = {index: TokenDraw(item) for index, item in enumerate(items) if item.sampling is not None}
        settings = generation_settings(model)  # few models have any
        rules = [CheckpointRules(settings, item, self.end_tokens) for item in items] if settings else []
        self.rules = {index: of_item for index, of_item in enumerate(rules) if of_item}
        self.new_tokens: list[list[int]] = [[] for _ in items]
        self.stop: list[StopReason | None] = [None] * len(items)

    def restart(self, rows: Sequence[int]) -> None:
        """Forget the tokens of items, which are continued from their beginning once more."""
        for index in rows:
            self.new_tokens[index], self.stop[index] = [], None
            if index in self.draws:
                self.draws[index] = TokenDraw(self.items[index])

    def is_greedy(self, index: int) -> bool:
        """Whether each token is the most likely one and is read next: no draw, no rule, no given target."""
        return index not in self.draws and index not in self.rules and not self.items[index].forced

    def chosen(
        self, running: Sequence[int], most_likely: list[int], states_RD: torch.Tensor, head: LMHead
    ) -> list[int]:
        """The next token of every running item: the most likely one (under the checkpoint's rules), or a draw.

        ``NO_TOKEN`` without finite logits, whatever the rules would make of them.

        Args:
            most_likely: tokens by row of ``states_RD``; changed in place.
        """
        for row, index in enumerate(running):
            if most_likely[row] == NO_TOKEN:
                continue
            if draw := self.draws.get(index):
                most_likely[row] = draw.token(head.logits(states_RD[row : row + 1], WHOLE_VOCAB)[0])
            elif rules := self.rules.get(index):
                logits_V = head.logits(states_RD[row : row + 1], WHOLE_VOCAB)[0]
                most_likely[row] = rules.token(self.new_tokens[index], logits_V)
        return most_likely

    def append(self, index: int, token: int) -> bool:
        """Append a token to an item; return whether the item has stopped."""
        item, tokens = self.items[index], self.new_tokens[index]
        if token == NO_TOKEN:
            self.stop[index] = "not_finite"
            return True
        tokens.append(token)
        if token in self.end_tokens and not item.ignore_end:
            self.stop[index] = "eos"
        elif is_stopped(self.tokenizer, tokens, item):
            self.stop[index] = "stop_string"
        elif has_full_length(self.tokenizer, tokens, item):
            self.stop[index] = "length"
        return self.stop[index] is not None

    def token_read(self, index: int) -> int:
        """The token that the model reads next."""
        return self.items[index].token_read(self.new_tokens[index])

    def answer(self, index: int) -> GeneratedText:
        """The answer of an item that has stopped."""
        return generated_text(self.tokenizer, self.new_tokens[index], self.items[index], self.stop[index])


def end_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end tokens of the tokenizer and of the model's generation config."""
    ends = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends.update(configured if isinstance(configured, (list, tuple)) else [configured])
    return {int(token) for token in ends if token is not None}


def is_stopped(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], item: GenerateItem) -> bool:
    """Whether the answer in these new tokens contains a stop string of the item.

    As lm-eval's stop criterion, the text is read with its special tokens, which may be stop strings.
    """
    if not item.stops:
        return False
    length = thought_length(tokenizer, tokens, item.think_end)
    if length is None:
        return False
    # The whole text, because one character may take several tokens and a stop string may cross them.
    text = _decoded(tokenizer, tokens[length:], skip_special_tokens=False)
    return any(stop in (text.lstrip() if length else text) for stop in item.stops)


def has_full_length(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], item: GenerateItem) -> bool:
    """Whether the answer in these new tokens may not become longer: its thought, what follows it, or both."""
    if item.max_thought_tokens is None or item.think_end is None:
        return len(tokens) >= item.max_new_tokens
    if len(tokens) >= item.most_tokens:  # a model that repeats the end of its thought begins its answer again and again
        return True
    length = thought_length(tokenizer, tokens, item.think_end)
    if length is None:
        return len(tokens) >= item.max_thought_tokens
    return len(tokens) - length >= item.max_new_tokens


def generated_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], item: GenerateItem, stop: StopReason | None
) -> GeneratedText:
    """The answer in new tokens, without the thought before it.

    As in lm-eval, white space between thought and answer is dropped.
    """
    length = thought_length(tokenizer, tokens, item.think_end)
    if length is None:
        thought = _decoded(tokenizer, tokens)
        return GeneratedText(raw="", token_ids=(), stop=stop, thought=thought, unfinished=True)
    if item.with_prompt and not length:
        text = _decoded(tokenizer, [*item.context, *tokens])[len(_decoded(tokenizer, item.context)) :]
    else:
        text = _decoded(tokenizer, tokens[length:])
    return GeneratedText(
        raw=text.lstrip() if length else text,
        token_ids=tuple(tokens[length:]),
        stop=stop,
        thought=_decoded(tokenizer, tokens[:length]) if length else None,
        target_ids=item.target,
    )


def thought_length(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], think_end: int | str | None
) -> int | None:
    """Number of tokens up to the last end of a thought; 0 without thoughts, ``None`` if the thought has no end."""
    if think_end is None:
        return 0
    if isinstance(think_end, int):
        return next((i + 1 for i in range(len(tokens) - 1, -1, -1) if tokens[i] == think_end), None)
    ends = _decoded(tokenizer, tokens).count(think_end)
    if ends == 0:
        return None
    length = len(tokens)
    while _decoded(tokenizer, tokens[: length - 1]).count(think_end) == ends:
        length -= 1
    return length


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
