"""Asking questions under edits: many prompts of many edits in one forward pass or one decoding loop.

Low-rank edits and most hooked ones act per row (`RowEdits`), so rows of different edits and of the unedited model share
a batch.
Other edits are applied, asked and undone one after another; the caller sees no difference. Prompts are right-padded
for the prefill, which is exact under causal attention; keys and values are then shifted to a common last column, so
that no padding is ever computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from edit_hooks.architectures import decoder_of, input_device, unwrapped
from edit_hooks.capture import frozen
from edit_hooks.delta import AppliedDeltas, Delta
from edit_hooks.kv_cache import right_aligned, right_padded, select_rows
from edit_hooks.row_edits import RowEdits
from edit_hooks.vocabulary import Head, best_words, log_likelihoods

Progress = Callable[[int], None]


@dataclass(frozen=True)
class ScoreItem:
    """A continuation to be scored after a context, as token ids.

    Attributes:
        texts: context and continuation as texts, from which edits that change prompts build the item again.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    texts: tuple[str, str] | None = None

    def record(self, token_logprobs: list[float], token_argmax: list[int]) -> dict[str, Any]:
        """The answer to this item, from what the model says at each position of the continuation."""
        return {
            "logprob": sum(token_logprobs),
            "is_greedy": token_argmax == list(self.continuation),
            "num_tokens": len(self.continuation),
            "token_logprobs": token_logprobs,
            "token_argmax": token_argmax,
            "token_ids": list(self.continuation),
        }


@dataclass(frozen=True)
class GenerateItem:
    """A context to be continued greedily until a stop string, an end token or ``max_new_tokens``.

    Attributes:
        text: the context as text, from which edits that change prompts build the item again.
    """

    context: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int
    text: str | None = None


@dataclass(frozen=True)
class Limits:
    """How much is computed at once.

    Attributes:
        max_tokens: tokens (padding included) of one forward pass.
        max_rows: rows of one batch.
    """

    max_tokens: int = 4096
    max_rows: int = 256


def score(
    model: nn.Module,
    items: Sequence[tuple[ScoreItem, Delta | None]],
    limits: Limits,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Log-probabilities and teacher-forced argmaxes of continuations, each under its own edit.

    Returns:
        Per item ``logprob``, ``is_greedy``, ``num_tokens``, ``token_logprobs``, ``token_argmax``, ``token_ids``.
    """
    inner = unwrapped(model)
    lengths = [len(item.context) + len(item.continuation) - 1 for item, _ in items]
    results: list[dict[str, Any]] = [{}] * len(items)

    def run(batch: list[int], deltas: list[Delta | None]) -> None:
        answers = _score_batch(inner, [items[index][0] for index in batch], deltas)
        for index, answer in zip(batch, answers, strict=True):
            results[index] = answer
        progress(len(batch))

    _in_batches(model, [delta for _, delta in items], lengths, limits, run)
    return results


@torch.no_grad()
def _score_batch(model: nn.Module, items: list[ScoreItem], deltas: list[Delta | None]) -> list[dict[str, Any]]:
    device = input_device(model)
    fed = [(*item.context, *item.continuation)[:-1] for item in items]
    ids_RT, mask_RT = right_padded(fed, device)
    positions = [
        (row, len(item.context) - 1 + i, token)
        for row, item in enumerate(items)
        for i, token in enumerate(item.continuation)
    ]
    row_L, column_L, token_L = (torch.tensor(part, device=device) for part in zip(*positions, strict=True))
    prompt_length_R = torch.tensor([len(item.context) for item in items], device=device)
    with RowEdits(model, deltas).prefill(mask_RT, prompt_length_R):
        hidden_RTD = decoder_of(model)(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).last_hidden_state
    states_LD = hidden_RTD[row_L.to(hidden_RTD.device), column_L.to(hidden_RTD.device)]
    logprob_L, argmax_L = (part.tolist() for part in log_likelihoods(Head(model), states_LD, token_L))
    answers, start = [], 0
    for item in items:
        stop = start + len(item.continuation)
        answers.append(item.record(logprob_L[start:stop], argmax_L[start:stop]))
        start = stop
    return answers


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[tuple[GenerateItem, Delta | None]],
    limits: Limits,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Greedy continuations, each under its own edit; a row leaves the batch when it has stopped.

    Returns:
        Per item ``text`` (not cut at the stop string), ``token_ids`` and ``stop`` (eos, stop_string or length).
    """
    inner = unwrapped(model)
    results: list[dict[str, Any]] = [{}] * len(items)

    def run(batch: list[int], deltas: list[Delta | None]) -> None:
        loop = _GreedyLoop(inner, tokenizer, [items[index][0] for index in batch], deltas)
        for index, answer in zip(batch, loop.run(), strict=True):
            results[index] = answer
        progress(len(batch))

    lengths = [len(item.context) + item.max_new_tokens for item, _ in items]
    _in_batches(model, [delta for _, delta in items], lengths, limits, run)
    return results


class _GreedyLoop:
    """Prefill once, then one token per step for the rows that have not stopped."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        items: list[GenerateItem],
        deltas: list[Delta | None],
    ) -> None:
        self.model, self.tokenizer, self.items = model, tokenizer, items
        self.device = input_device(model)
        self.head = Head(model)
        self.edits = RowEdits(model, deltas)
        self.end_tokens = end_token_ids(model, tokenizer)
        self.new_tokens: list[list[int]] = [[] for _ in items]
        self.stop: list[str | None] = [None] * len(items)

    @torch.no_grad()
    def run(self) -> list[dict[str, Any]]:
        running = list(range(len(self.items)))
        next_tokens, cache, mask_RC, length_R = self._prefill()
        edits = self.edits
        while True:
            kept = [row for row, index in enumerate(running) if not self._append(index, next_tokens[row])]
            if not kept:
                break
            if len(kept) < len(running):
                rows = torch.tensor(kept, device=self.device)
                running = [running[row] for row in kept]
                cache = select_rows(cache, rows)
                mask_RC, length_R, edits = mask_RC[rows], length_R[rows], edits.select(rows)
            ids_R1 = torch.tensor([[self.new_tokens[index][-1]] for index in running], device=self.device)
            mask_RC = torch.cat([mask_RC, torch.ones_like(mask_RC[:, :1])], 1)
            with edits.step():
                hidden_R1D = decoder_of(self.model)(
                    input_ids=ids_R1,
                    attention_mask=mask_RC,
                    position_ids=length_R[:, None],
                    past_key_values=cache,
                    use_cache=True,
                ).last_hidden_state
            length_R = length_R + 1
            next_tokens = best_words(self.head, hidden_R1D[:, -1]).tolist()
        return [self._answer(index) for index in range(len(self.items))]

    def _prefill(self) -> tuple[list[int], DynamicCache, torch.Tensor, torch.Tensor]:
        """First tokens, the cache shifted so that all prompts end in the same column, its mask, the prompt lengths."""
        ids_RT, mask_RT = right_padded([item.context for item in self.items], self.device)
        length_R = mask_RT.sum(1)
        rows_R = torch.arange(len(ids_RT), device=self.device)
        cache = DynamicCache()
        decoder = decoder_of(self.model)
        with self.edits.prefill(mask_RT, length_R):
            output = decoder(input_ids=ids_RT, attention_mask=mask_RT, past_key_values=cache, use_cache=True)
        hidden_RTD = output.last_hidden_state
        last_RD = hidden_RTD[rows_R.to(hidden_RTD.device), (length_R - 1).to(hidden_RTD.device)]
        aligned = right_aligned(cache, length_R, ids_RT.shape[1])
        return best_words(self.head, last_RD).tolist(), aligned.cache, aligned.mask_RT, length_R

    def _append(self, index: int, token: int) -> bool:
        """Add a token to an item; returns whether the item has now stopped."""
        item, tokens = self.items[index], self.new_tokens[index]
        tokens.append(token)
        if token in self.end_tokens:
            self.stop[index] = "eos"
        elif any(stop in self._text(tokens) for stop in item.stops):
            self.stop[index] = "stop_string"
        elif len(tokens) >= item.max_new_tokens:
            self.stop[index] = "length"
        return self.stop[index] is not None

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _answer(self, index: int) -> dict[str, Any]:
        tokens = self.new_tokens[index]
        return {"text": self._text(tokens), "token_ids": tokens, "stop": self.stop[index]}


def end_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a text: the tokenizer's end token and those of the model's generation config."""
    ends = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends.update(configured if isinstance(configured, (list, tuple)) else [configured])
    return {int(token) for token in ends if token is not None}


def _in_batches(
    model: nn.Module,
    deltas: Sequence[Delta | None],
    lengths: Sequence[int],
    limits: Limits,
    run: Callable[[list[int], list[Delta | None]], None],
) -> None:
    """Run items in length-sorted batches: edits that act per row and none mixed, every other edit for its own."""
    per_row = [index for index, delta in enumerate(deltas) if delta is None or delta.acts_per_row]
    groups: dict[int, list[int]] = {}
    for index, delta in enumerate(deltas):
        if delta is not None and not delta.acts_per_row:
            groups.setdefault(id(delta), []).append(index)
    with frozen(unwrapped(model)):
        for batch in _batches(per_row, lengths, limits):
            run(batch, [deltas[index] for index in batch])
        for group in groups.values():
            delta = deltas[group[0]]
            assert delta is not None
            with AppliedDeltas(model) as applied:
                applied.add(delta)
                for batch in _batches(group, lengths, limits):
                    run(batch, [applied.standing] * len(batch))


def _batches(indices: Iterable[int], lengths: Sequence[int], limits: Limits) -> Iterator[list[int]]:
    """Batches of similar length, longest first, within the limits."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        width = lengths[batch[0]] if batch else lengths[index]
        if batch and (len(batch) >= limits.max_rows or (len(batch) + 1) * width > limits.max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
