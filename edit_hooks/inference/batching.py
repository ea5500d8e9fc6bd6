"""Batches of items of similar length, each row under its own edit where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import Limits
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.hooks import frozen
from edit_hooks.utils.batching import token_batches


def run_in_batches(
    model: nn.Module,
    deltas: Sequence[Delta | None],
    lengths: Sequence[int],
    limits: Limits,
    run: Callable[[list[int], list[Delta | None]], None],
) -> None:
    """Call ``run(indices, deltas)`` for every batch.

    Items whose edits act per row share batches with each other and with items without an edit. Any other edit is
    written into the weights while its items run.

    Args:
        deltas: edit of every item, or None.
        lengths: number of tokens of every item.
        run: receives the batch as positions in ``deltas``, and for each row the edit that still has to be applied.
    """
    per_row = [index for index, delta in enumerate(deltas) if delta is None or delta.acts_per_row]
    written: dict[Delta, list[int]] = {}
    for index, delta in enumerate(deltas):
        if delta is not None and not delta.acts_per_row:
            written.setdefault(delta, []).append(index)
    with frozen(unwrapped(model)):
        for batch in _batches(per_row, lengths, limits):
            run(batch, [deltas[index] for index in batch])
        for delta, indices in written.items():
            with AppliedDeltas(model) as applied:
                applied.add(delta)
                for batch in _batches(indices, lengths, limits):
                    run(batch, [applied.runtime_part] * len(batch))


def _batches(indices: Iterable[int], lengths: Sequence[int], limits: Limits) -> Iterator[list[int]]:
    """Yield batches of similar length, longest first, within the limits."""
    longest_first = sorted(indices, key=lambda index: (-lengths[index], index))
    return token_batches(longest_first, lengths, limits.max_tokens, limits.max_rows)
