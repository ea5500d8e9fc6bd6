"""Batched decoding under edits with a KV cache, greedy or with seeded draws.

Prompts are right-padded for the prefill, and a long beginning that several share is run once; both are exact under
causal attention. The KV cache is then shifted so that all prompts end in the same column. Each step decodes one token
for the rows that have not stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from edit_hooks.answers import GeneratedText
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.generation.continuations import Continuations
from edit_hooks.inference.generation.slots import decode_in_slots, uses_slots
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.forward.kv_cache import CACHE, right_aligned, right_padded, select_rows
from edit_hooks.modeling.forward.length_dependence import length_rules
from edit_hooks.modeling.forward.vocab_loss import greedy_tokens
from edit_hooks.utils.progress import Finished, Progress, ignore_finished

ANY_NUMBER = Limits(sys.maxsize, sys.maxsize)  # of items that wait for a slot


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[tuple[GenerateItem, Delta | None]],
    limits: Limits,
    progress: Progress,
    finished: Finished = ignore_finished,
) -> list[GeneratedText]:
    """Continue prompts, each under its own edit.

    A row leaves its batch when it stops. Texts are not cut at stop strings. On a GPU the rows of low-rank edits take
    turns in a batch of fixed shape (:mod:`~edit_hooks.inference.generation.slots`).

    Args:
        finished: gets the answers of each batch.

    Returns:
        One answer per item, in the order of the items.
    """
    inner = unwrapped(model)
    answers: dict[int, GeneratedText] = {}

    def keep(indices: Sequence[int], texts: Sequence[GeneratedText]) -> None:
        answers.update(zip(indices, texts, strict=True))
        finished(indices, texts)
        progress(len(indices))

    def run(batch: Batch) -> None:
        continuations = Continuations(inner, tokenizer, [items[index][0] for index in batch.indices])
        keep(batch.indices, _DecodingLoop(inner, continuations, batch).run())

    def run_in_slots(batch: Batch) -> None:
        # after a lack of memory a batch comes again in halves, of which some rows have been answered
        left = [row for row, index in enumerate(batch.indices) if index not in answers]
        continuations = Continuations(inner, tokenizer, [items[index][0] for index in batch.indices])
        decode_in_slots(inner, continuations, batch, left, limits, keep)

    def answer_all(indices: Sequence[int], bounds: Limits, run_batch: Callable[[Batch], None]) -> None:
        chosen = [items[index] for index in indices]
        lengths = [len(item.context) + item.most_tokens for item, _ in chosen]
        beginnings = {position: item.context[:-1] for position, (item, _) in enumerate(chosen)}
        prompt_lengths = [len(item.context) for item, _ in chosen]

        def run_chosen(batch: Batch) -> None:
            run_batch(replace(batch, indices=[indices[position] for position in batch.indices]))

        deltas = [delta for _, delta in chosen]
        run_in_batches(model, deltas, lengths, bounds, run_chosen, beginnings, prompt_lengths)

    slotted = [index for index, (_, delta) in enumerate(items) if uses_slots(inner, delta)]
    answer_all(slotted, ANY_NUMBER, run_in_slots)
    answer_all(sorted({*range(len(items))} - {*slotted}), limits, run)
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

    def __init__(self, model: nn.Module, continuations: Continuations, batch: Batch) -> None:
        self.texts = _RunningTexts(model, continuations.items, batch)
        self.head = self.texts.forward.head(model)
        self.continuations = continuations

    @torch.no_grad()
    def run(self) -> list[GeneratedText]:
        continuations = self.continuations
        running = list(range(len(continuations.items)))
        next_tokens = self._next_tokens(running, self.texts.first())
        while True:
            unfinished = [row for row, index in enumerate(running) if not continuations.append(index, next_tokens[row])]
            if not unfinished:
                break
            running = [running[row] for row in unfinished]
            read = [continuations.token_read(index) for index in running]
            next_tokens = self._next_tokens(running, self.texts.next(unfinished, read))
        return [continuations.answer(index) for index in range(len(continuations.items))]

    def _next_tokens(self, running: Sequence[int], states_RD: torch.Tensor) -> list[int]:
        return self.continuations.chosen(running, greedy_tokens(self.head, states_RD).tolist(), states_RD, self.head)
