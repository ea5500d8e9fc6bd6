"""Batches of items of similar length, each row under its own edit where possible; shared beginnings run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits, acts_per_row
from edit_hooks.inference.items import Limits
from edit_hooks.modeling.architectures import input_device, unwrapped
from edit_hooks.modeling.device.recording import release_memory
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.forward.length_dependence import forget_lengths, length_rules
from edit_hooks.modeling.forward.prefix_cache import PrefixCache, compute_prefix_cache, shared_heads
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.memory import forward_bytes_per_token, free_cuda_bytes
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)

# Shared tokens that are worth a pass of their own: demonstrations, not the few words that many questions begin with.
MIN_SHARED_TOKENS = 128


# One batch of 256 questions on an H100 and Llama 3 8B: scored in 0.13 s, in 0.95 s with the CPU's limit.
MOST_TOKENS_GPU, MOST_ROWS_GPU = 2**15, 2**10


def limits_for(model: Any, max_tokens: int | None = None) -> Limits:
    """Limits of a pass on the model's devices.

    On a CPU those of :class:`~edit_hooks.inference.items.Limits`. On GPUs as many tokens as half of the free memory of
    the fullest one holds, up to :data:`MOST_TOKENS_GPU`.

    Args:
        max_tokens: tokens of a pass, in place of those.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if {device.type for device in devices} != {"cuda"}:
        return Limits() if max_tokens is None else Limits(max_tokens)
    if max_tokens is None:
        budget = min(map(free_cuda_bytes, devices)) // 2
        max_tokens = min(MOST_TOKENS_GPU, max(budget // forward_bytes_per_token(model), 1))
    return Limits(max_tokens, MOST_ROWS_GPU)


@dataclass(frozen=True)
class Batch:
    """Items of one forward pass.

    Attributes:
        indices: the items, by position.
        deltas: for each row the edit that still has to be applied.
        prefix: keys and values of the tokens that all rows begin with, which are not run again; ``None`` without any.
    """

    indices: list[int]
    deltas: list[Delta | None]
    prefix: PrefixCache | None = None

    @property
    def num_known(self) -> int:
        """Number of tokens of every row that are in the prefix."""
        return 0 if self.prefix is None else self.prefix.width

    def inputs(self, ids_RT: torch.Tensor, mask_RT: torch.Tensor) -> dict[str, Any]:
        """Arguments of a decoder that runs the rows' remaining tokens, padded on the right."""
        if self.prefix is None:
            return {"input_ids": ids_RT, "attention_mask": mask_RT}
        return self.prefix.inputs(ids_RT, mask_RT)

    def split(self) -> tuple[Batch, Batch]:
        """The two halves of a batch of at least two rows."""
        middle = len(self.indices) // 2

        def part(rows: range) -> Batch:
            prefix = self.prefix and self.prefix.select(torch.tensor(rows, device=self.prefix.mask_RP.device))
            return Batch([self.indices[row] for row in rows], [self.deltas[row] for row in rows], prefix)

        return part(range(middle)), part(range(middle, len(self.indices)))


def run_in_batches(
    model: nn.Module,
    deltas: Sequence[Delta | None],
    lengths: Sequence[int],
    limits: Limits,
    run: Callable[[Batch], None],
    beginnings: Mapping[int, Sequence[int]] | None = None,
    prompt_lengths: Sequence[int] | None = None,
) -> None:
    """Call ``run`` for every batch.

    Items whose edits act per row share batches with each other and with items without an edit. Any other edit is
    written into the weights while its items run.

    Args:
        deltas: edit of every item, or None.
        lengths: number of tokens of every item, at the end of decoding.
        run: runs a batch; its indices are positions in ``deltas``.
        beginnings: by item, its tokens before the first position that is read. Where items of one edit share at least
            :data:`MIN_SHARED_TOKENS` of them, these run once (not under hook edits, which read prompts as a whole,
            nor where keys depend on the length of the text). Items without an entry run in full.
        prompt_lengths: number of tokens of every item in its first pass; by default all. Where keys depend on the
            length, items share a batch only if each has the keys that it has alone.

    Raises:
        EditingError: where a single row does not fit into the device's memory. A batch of several that does not is
            halved, and so are later ones of its size.
    """
    run = _HalvingRunner(run, lengths)
    if not deltas:
        return
    inner = unwrapped(model)
    alone = {delta: acts_per_row(inner, delta) for delta in dict.fromkeys(deltas)}
    per_row = {index: delta for index, delta in enumerate(deltas) if alone[delta]}
    written: dict[Delta, list[int]] = {}
    for index, delta in enumerate(deltas):
        if delta is not None and index not in per_row:
            written.setdefault(delta, []).append(index)
    rules, forward = length_rules(inner), forward_pass_of(inner)
    if rules or not forward.shares:
        beginnings = None
    if not forward.pads:
        limits = replace(limits, max_rows=1)

    def batches(deltas: Mapping[int, Delta | None]) -> Iterator[Batch]:
        groups: dict[Hashable, dict[int, Delta | None]] = {}
        for index, delta in deltas.items():
            prompt_length = lengths[index] if prompt_lengths is None else prompt_lengths[index]
            group = tuple(rule.group(prompt_length, lengths[index]) for rule in rules)
            groups.setdefault(group, {})[index] = delta
        for members in groups.values():
            for batch in _batches(inner, members, lengths, limits, beginnings):
                forget_lengths(inner)
                yield batch

    with frozen(inner):
        for batch in batches(per_row):
            run(batch)
        for delta, indices in written.items():
            with AppliedDeltas(model) as applied:
                applied.add(delta)
                remaining = dict.fromkeys(indices, applied.runtime_part)
                for batch in batches(remaining):
                    run(batch)


class _HalvingRunner:
    """Runs batches; one that does not fit into the device's memory in halves."""

    def __init__(self, run: Callable[[Batch], None], lengths: Sequence[int]) -> None:
        self.run, self.lengths = run, lengths
        self.most_tokens: float = math.inf  # of a batch that is tried

    def __call__(self, batch: Batch) -> None:
        tokens = len(batch.indices) * max(self.lengths[index] for index in batch.indices)
        if tokens <= self.most_tokens or len(batch.indices) == 1:
            if self._fits(batch, tokens):
                return
            self.most_tokens = tokens // 2
        for half in batch.split():
            self(half)

    def _fits(self, batch: Batch, tokens: int) -> bool:
        """Run a batch; whether there was enough memory for it."""
        try:
            self.run(batch)
            return True
        except torch.OutOfMemoryError as error:
            if len(batch.indices) == 1:
                raise EditingError(
                    f"a prompt of {tokens} tokens does not fit into the memory of the device: {first_line(error)} "
                    "Use a smaller dtype, parallelize=True over several devices, or a device with more memory."
                ) from None
        # Here the exception is gone, and with it the frames that hold the tensors of the failed pass.
        log.warning(
            "a batch of %d rows (%d tokens) does not fit into the memory of the device and is halved; "
            "max_batch_tokens=%d avoids the attempt",
            *(len(batch.indices), tokens, tokens // 2),
        )
        release_memory()
        return False


def _batches(
    model: nn.Module,
    deltas: Mapping[int, Delta | None],
    lengths: Sequence[int],
    limits: Limits,
    beginnings: Mapping[int, Sequence[int]] | None,
) -> Iterator[Batch]:
    """Yield batches of the items in ``deltas``: first those with a shared beginning, then the others."""
    apart = dict.fromkeys(deltas)  # an ordered set
    for indices, tokens in _shared_beginnings(deltas, beginnings or {}):
        delta = deltas[indices[0]]
        prefix = _run_beginning(model, tokens, delta)
        for batch in _similar_lengths(indices, lengths, limits):
            yield Batch(batch, [delta] * len(batch), prefix.repeated(len(batch)))
        for index in indices:
            del apart[index]
    for batch in _similar_lengths(apart, lengths, limits):
        yield Batch(batch, [deltas[index] for index in batch])


def _shared_beginnings(
    deltas: Mapping[int, Delta | None], beginnings: Mapping[int, Sequence[int]]
) -> Iterator[tuple[list[int], Sequence[int]]]:
    """Yield the items that share a beginning under one edit, and its tokens."""
    of_edit: dict[Delta | None, list[int]] = {}
    for index, delta in deltas.items():
        if index in beginnings and (delta is None or delta.hook_edit is None):
            of_edit.setdefault(delta, []).append(index)
    for indices in of_edit.values():
        for rows, length in shared_heads([beginnings[index] for index in indices], MIN_SHARED_TOKENS):
            yield [indices[row] for row in rows], beginnings[indices[rows[0]]][:length]


def _run_beginning(model: nn.Module, tokens: Sequence[int], delta: Delta | None) -> PrefixCache:
    """Keys and values of one row of tokens under an edit."""
    mask_1T = torch.ones(1, len(tokens), dtype=torch.long, device=input_device(model))
    with RowEdits(model, [delta]).prefill(mask_1T, mask_1T.sum(1)):
        cache = compute_prefix_cache(model, [tokens])
    assert cache is not None, "a shared beginning has tokens"
    return cache


def _similar_lengths(indices: Iterable[int], lengths: Sequence[int], limits: Limits) -> Iterator[list[int]]:
    """Yield batches of similar length, longest first, within the limits."""
    longest_first = sorted(indices, key=lambda index: (-lengths[index], index))
    return token_batches(longest_first, lengths, limits.max_tokens, limits.max_rows)
