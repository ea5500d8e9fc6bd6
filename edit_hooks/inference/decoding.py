"""Batched decoding under edits with a KV cache, greedy or with seeded draws.

Prompts are right-padded for the prefill, and a long beginning that several share is run once; both are exact under
causal attention. The KV cache is then shifted so that all prompts end in the same column. Each step decodes one token
for the rows that have not stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from edit_hooks.answers import GeneratedText, StopReason
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.checkpoint_rules import CheckpointRules
from edit_hooks.inference.drawing import TokenDraw
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.fingerprint.generation_settings import generation_settings
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.forward.kv_cache import CACHE, right_aligned, right_padded, select_rows
from edit_hooks.modeling.forward.length_dependence import length_rules
from edit_hooks.modeling.forward.vocab_loss import NO_TOKEN, WHOLE_VOCAB, greedy_tokens
from edit_hooks.utils.progress import Finished, Progress, ignore_finished


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[tuple[GenerateItem, Delta | None]],
    limits: Limits,
    progress: Progress,
    finished: Finished = ignore_finished,
) -> list[GeneratedText]:
    """Continue prompts, each under its own edit.

    A row leaves its batch when it stops. Texts are not cut at stop strings.

    Args:
        finished: gets the answers of each batch.

    Returns:
        One answer per item, in the order of the items.
    """
    inner = unwrapped(model)
    answers: dict[int, GeneratedText] = {}

    def run(batch: Batch) -> None:
        loop = _DecodingLoop(inner, tokenizer, [items[index][0] for index in batch.indices], batch)
        texts = loop.run()
        answers.update(zip(batch.indices, texts, strict=True))
        finished(batch.indices, texts)
        progress(len(batch.indices))

    lengths = [len(item.context) + item.most_tokens for item, _ in items]
    beginnings = {index: item.context[:-1] for index, (item, _) in enumerate(items)}
    prompt_lengths = [len(item.context) for item, _ in items]
    run_in_batches(model, [delta for _, delta in items], lengths, limits, run, beginnings, prompt_lengths)
    return [answers[index] for index in range(len(items))]


class _RunningTexts:
    """The rows of a batch that have not stopped, and the passes over them.

    The prompts run in one pass, then one token per row and step on top of the KV cache. Whole texts run again where
    that cannot be: at every step of models without such a cache, and at the step at which all keys change.
    """

    def __init__(self, model: nn.Module, items: Sequence[GenerateItem], batch: Batch) -> None:
        self.model, self.batch, self.device = model, batch, input_device(model)
        self.forward, self.edits = forward_pass_of(model), RowEdits(model, batch.deltas)
        self.texts = [list(item.context) for item in items]
        self.prompt_length_R = torch.tensor([len(item.context) for item in items], device=self.device)
        self.borders = {rule.border for rule in length_rules(model) if rule.rope_type == "longrope"}
        self.cache: DynamicCache
        self.mask_RC: torch.Tensor
        self.length_R: torch.Tensor

    def first(self) -> torch.Tensor:
        """The states of the prompts' last tokens."""
        return self._run_texts(self.batch)

    def next(self, rows: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The states of one more token in each of ``rows``; the other rows are dropped."""
        if len(rows) < len(self.texts):
            self._keep(rows)
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        if not self.forward.decodes or any(len(text) - 1 in self.borders for text in self.texts):
            return self._run_texts(Batch(self.batch.indices, self.batch.deltas))
        self.mask_RC = torch.cat([self.mask_RC, torch.ones_like(self.mask_RC[:, :1])], 1)
        inputs = {
            "input_ids": torch.tensor(tokens, device=self.device)[:, None],
            "attention_mask": self.mask_RC,
            "position_ids": self.length_R[:, None],
            CACHE: self.cache,
        }
        row_R = torch.arange(len(tokens), device=self.device)
        with self.edits.step():
            states_RD = self.forward.states_at(self.model, inputs, row_R, torch.zeros_like(row_R), use_cache=True)
        self.length_R = self.length_R + 1
        return states_RD

    def _keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        self.texts = [self.texts[row] for row in rows]
        self.prompt_length_R, self.edits = self.prompt_length_R[index], self.edits.select(index)
        if self.forward.decodes:
            self.cache = select_rows(self.cache, index)
            self.mask_RC, self.length_R = self.mask_RC[index], self.length_R[index]

    def _run_texts(self, batch: Batch) -> torch.Tensor:
        """Run the texts after the batch's prefix; the states of their last tokens.

        Sets the KV cache, shifted so that all texts end in the same column, its mask [R, C] and the lengths [R].
        """
        known = batch.num_known
        ids_RT, mask_RT = right_padded([text[known:] for text in self.texts], self.device)
        new_R = mask_RT.sum(1)  # tokens of each row that are not in the prefix
        row_R = torch.arange(len(ids_RT), device=self.device)
        inputs, decodes = batch.inputs(ids_RT, mask_RT), self.forward.decodes
        if decodes:
            inputs = {CACHE: DynamicCache(), **inputs}
        with self.edits.prefill(mask_RT, self.prompt_length_R - known):
            states_RD = self.forward.states_at(self.model, inputs, row_R, new_R - 1, use_cache=decodes)
        if decodes:
            self.length_R = known + new_R
            aligned = right_aligned(inputs[CACHE], self.length_R, known + ids_RT.shape[1])
            self.cache, self.mask_RC = aligned.cache, aligned.mask_RT
        return states_RD


class _DecodingLoop:
    """One batch: a prefill, then one token per step for unfinished rows."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        items: list[GenerateItem],
        batch: Batch,
    ) -> None:
        self.tokenizer, self.items = tokenizer, items
        self.texts = _RunningTexts(model, items, batch)
        self.head = self.texts.forward.head(model)
        self.end_tokens = end_token_ids(model, tokenizer)
        self.draws = {index: TokenDraw(item) for index, item in enumerate(items) if item.sampling is not None}
        settings = generation_settings(model)  # few models have any
        rules = [CheckpointRules(settings, item, self.end_tokens) for item in items] if settings else []
        self.rules = {index: of_item for index, of_item in enumerate(rules) if of_item}
        self.new_tokens: list[list[int]] = [[] for _ in items]
        self.stop: list[StopReason | None] = [None] * len(items)

    @torch.no_grad()
    def run(self) -> list[GeneratedText]:
        running = list(range(len(self.items)))
        next_tokens = self._next_tokens(running, self.texts.first())
        while True:
            unfinished = [row for row, index in enumerate(running) if not self._append(index, next_tokens[row])]
            if not unfinished:
                break
            running = [running[row] for row in unfinished]
            read = [self.items[index].token_read(self.new_tokens[index]) for index in running]
            next_tokens = self._next_tokens(running, self.texts.next(unfinished, read))
        return [self._answer(index) for index in range(len(self.items))]

    def _next_tokens(self, running: Sequence[int], states_RD: torch.Tensor) -> list[int]:
        """The next token of every running item: the most likely one (under the checkpoint's rules), or a draw.

        ``NO_TOKEN`` without finite logits, whatever the rules would make of them.
        """
        tokens = greedy_tokens(self.head, states_RD).tolist()
        for row, index in enumerate(running):
            if tokens[row] == NO_TOKEN:
                continue
            if draw := self.draws.get(index):
                tokens[row] = draw.token(self.head.logits(states_RD[row : row + 1], WHOLE_VOCAB)[0])
            elif rules := self.rules.get(index):
                logits_V = self.head.logits(states_RD[row : row + 1], WHOLE_VOCAB)[0]
                tokens[row] = rules.token(self.new_tokens[index], logits_V)
        return tokens

    def _append(self, index: int, token: int) -> bool:
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

    def _answer(self, index: int) -> GeneratedText:
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
